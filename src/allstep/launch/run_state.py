"""The state of a run: which rank failed first, when to stop, the exit code.

Events in, decisions out (`run_events`). This module uses no clock, socket or process: times are
arguments, in seconds since the start of the run, and the launcher's loop carries decisions out.

=================================  =============================================================
event                              decision
=================================  =============================================================
a rank fails                       wait 0.25 s; while all failures look like consequences, up to
                                   2 s for the cause. Then ask the policy (`restart`), which
                                   stops the others: SIGTERM, SIGKILL 3 s later
a host is silent for `lost` s      count its ranks as failed
a signal to the launcher           forward it once; SIGKILL after the grace time, 3 s after
                                   Ctrl-C; a second Ctrl-C kills. Later exits are no failures
a signal to the agent of a host    the same, once: the other hosts cannot continue without it
a rank exits with 75               give the others the grace time too
the store ends, a host refuses     SIGKILL
10 s after SIGKILL                 give up hosts that have not reported the ends of their ranks
=================================  =============================================================
"""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allstep.launch import cause
from allstep.launch.cause import Failure
from allstep.launch.restart import Policy, Situation, Stop, fixed
from allstep.launch.run_events import (
    Conclusion,
    Decision,
    Event,
    Exited,
    Greeted,
    HostSignaled,
    KillAll,
    LeaveHost,
    LinkEnded,
    Refused,
    SendSignal,
    Signaled,
    StoreEnded,
    TracebackStarted,
    WorkerStarted,
    order,
)

RESUBMIT = 75
"""Exit code of a worker that has saved its state and should be started again."""

# Wait after the first failure: other ranks that failed independently may be about to report it.
_SETTLE_SECONDS = 0.25
# Wait for the cause while all failed ranks blame a lost connection or print nothing.
_CAUSE_SECONDS = 2.0
# Between SIGTERM and SIGKILL after a failure, or after Ctrl-C.
_STOP_SECONDS = 3.0
# Wait after SIGKILL for the agents to report the ends of their workers.
_GIVE_UP_SECONDS = 10.0
# A host that is silent for so long may be the cause.
_QUIET_SECONDS = 3.0
# A traceback that began longer before the exit does not explain it.
_TRACEBACK_SECONDS = 5.0
# The loop decides at least once a second; after a longer pause the launcher itself did not run.
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class HostRanks:
    """A host of the run and its ranks. remote: it can fall silent while its link stays open."""

    label: str
    ranks: Sequence[int]
    remote: bool = False


class RunState:
    """The state of one run, from the first hello to the exit code.

    hosts: in order of rank. grace: seconds between a forwarded signal and SIGKILL. lost: seconds
    after which a silent host is lost. policy: decides what follows a failure (default: stop).
    """

    def __init__(
        self, hosts: Sequence[HostRanks], grace: float, lost: float, policy: Policy = fixed
    ) -> None:
        self.hosts = hosts
        self.size = sum(len(host.ranks) for host in hosts)
        self.exits: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.signals: list[int] = []
        self.problem: str | None = None
        self.store_failure: str | None = None
        self.started = False
        self.stopping = False
        self.num_stopped = 0
        self.greeted: set[int] = set()
        self.over: set[int] = set()
        self.last_alive = [0.0 for _ in hosts]
        self._host_of = {rank: number for number, host in enumerate(hosts) for rank in host.ranks}
        self._grace, self._lost, self._policy = grace, lost, policy
        self._traceback_at: dict[int, float] = {}
        self._failed_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._decided_at = 0.0
        self._new_events: list[Event] = []
        self._decisions: list[Decision] = []

    # Events.

    def note_alive(self, host: int, now: float) -> None:
        """Record a sign of life of a host at time `now`: any message counts as one."""
        self.last_alive[host] = now

    def take(self, event: Event) -> None:
        """Record an event for the next `decide`."""
        self._new_events.append(event)

    def start(self) -> None:
        """Record that the agents have received their orders."""
        self.started = True

    # Decisions.

    def decide(self, now: float) -> list[Decision]:
        """Apply the events since the last call, and return what to do now."""
        self._discount_pause(now)
        news, self._new_events = sorted(self._new_events, key=order), []
        for event in news:
            self._apply(event)
        self._lose_silent_hosts(now)
        self._settle(now)
        self._kill_when_due(now)
        if self.must_end(now):
            self._give_up(now)
        return self._take_decisions()

    def decide_while_blocked(self, now: float) -> list[Decision]:
        """Decide while the loop waits for a reader of its output and reads no link.

        Only signals and their deadlines count then, because the links are not read.
        """
        kinds = Signaled | HostSignaled
        signaled = [event for event in self._new_events if isinstance(event, kinds)]
        self._new_events = [event for event in self._new_events if not isinstance(event, kinds)]
        for event in sorted(signaled, key=order):
            self._apply(event)
        self._kill_when_due(now)
        return self._take_decisions()

    def must_end(self, now: float) -> bool:
        """Return whether killed workers have had enough time to end."""
        return self._give_up_at is not None and now > self._give_up_at

    @property
    def has_deadline(self) -> bool:
        """Return whether time alone may lead to a decision soon."""
        has_timer = self._kill_at is not None or self._give_up_at is not None
        return bool(self.failures or self.signals or has_timer)

    @property
    def may_start(self) -> bool:
        """Return whether workers may be started: no problem, signal or failure so far."""
        return not (self.problem or self.signals or self.failures or self.store_failure)

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing left to wait for."""
        if self.problem or len(self.exits) == self.size:
            return True
        if not self.started and not self.may_start:
            # No worker was started, so there is no end to wait for.
            return True
        return len(self.over) == len(self.hosts)

    def _take_decisions(self) -> list[Decision]:
        decisions, self._decisions = self._decisions, []
        return decisions

    def _apply(self, event: Event) -> None:
        match event:
            case Greeted():
                self.greeted.add(event.host)
            case TracebackStarted():
                self._traceback_at[event.rank] = event.at
            case Exited():
                self._exited(event)
            case WorkerStarted():
                if self.stopping:
                    self._decisions.append(SendSignal(signal.SIGTERM, event.host))
            case Refused():
                self._end_with(event.text, event.at)
            case StoreEnded():
                if self.store_failure is None:
                    self.store_failure = event.reason
                    self._stop(signal.SIGKILL, event.at)
            case Signaled():
                self._signaled(event)
            case HostSignaled():
                if event.number not in self.signals:
                    self._signaled(Signaled(event.at, event.number))
            case LinkEnded():
                self._link_ended(event)

    def _exited(self, event: Exited) -> None:
        if event.rank in self.exits:
            return
        self.exits[event.rank] = event.code
        if event.code == 0 or self.stopping or self.signals:
            return
        if event.code == RESUBMIT:
            self._kill_at = event.at + self._grace if self._kill_at is None else self._kill_at
            return
        self._fail(
            Failure(
                event.rank,
                self.hosts[self._host_of[event.rank]].label,
                event.code,
                self._moment_of(event),
                event.errors,
                event.out_of_memory,
                blames=event.blames,
                fault=event.fault,
            ),
            event.at,
        )

    def _moment_of(self, event: Exited) -> float:
        """Return the time of a failure: the start of the traceback, else the exit."""
        complained = self._traceback_at.get(event.rank, event.at)
        return complained if event.at - complained < _TRACEBACK_SECONDS else event.at

    def _fail(self, failed: Failure, now: float) -> None:
        self.failures.append(failed)
        if self._failed_at is None:
            self._failed_at = now

    def _end_with(self, problem: str, now: float) -> None:
        """End the run with a problem that the user must fix, before the workers do anything."""
        if self.problem is None:
            self.problem = problem
            if self.started:
                self._stop(signal.SIGKILL, now)

    def _signaled(self, event: Signaled) -> None:
        if event.number == signal.SIGINT and signal.SIGINT in self.signals:
            self._kill(event.at)
        elif event.number not in self.signals:
            self.signals.append(event.number)
            self._decisions.append(SendSignal(event.number))
            grace = (
                min(self._grace, _STOP_SECONDS) if event.number == signal.SIGINT else self._grace
            )
            due = event.at + grace
            self._kill_at = due if self._kill_at is None else min(self._kill_at, due)

    def _link_ended(self, event: LinkEnded) -> None:
        """Count the host as lost, or as done if its ranks have ended.

        If the link ends before the hello, ssh or the agent could not start, which ends the run.
        """
        if event.host in self.over:
            return
        if event.host not in self.greeted:
            self._end_with(event.why, event.at)
        if self.problem or all(rank in self.exits for rank in self.hosts[event.host].ranks):
            self.over.add(event.host)
            self._decisions.append(LeaveHost(event.host, lost=False))
        else:
            self._lose(event.host, event.why, event.at)

    def _lose(self, host: int, why: str, now: float) -> None:
        """Count the ranks of a host that have not ended as failed."""
        self.over.add(host)
        self._decisions.append(LeaveHost(host, lost=True))
        left = [rank for rank in self.hosts[host].ranks if rank not in self.exits]
        self.exits.update(dict.fromkeys(left, 1))
        if left and not self.stopping and not self.signals:
            self._fail(
                Failure(left[0], self.hosts[host].label, 1, now, lost=f"{why} ({span(left)})"), now
            )

    # Decisions that depend on time alone.

    def _discount_pause(self, now: float) -> None:
        """Do not count time in which the launcher did not run (stopped or suspended) as silence."""
        since, self._decided_at = now - self._decided_at, now
        if since > _PAUSE_SECONDS:
            self.last_alive = [min(now, at + since) for at in self.last_alive]

    def _silence(self, now: float) -> dict[int, float]:
        """Return the seconds for which each remote host has been silent.

        Hosts without a hello are not included: connecting has a timeout of its own.
        """
        return {
            number: now - self.last_alive[number]
            for number, host in enumerate(self.hosts)
            if host.remote and number in self.greeted and number not in self.over
        }

    def _lose_silent_hosts(self, now: float) -> None:
        for host, seconds in self._silence(now).items():
            if seconds > self._lost:
                self._lose(host, f"no sign of life for {seconds:.0f} s", now)

    def _settle(self, now: float) -> None:
        """Ask the policy once the cause is known or the wait for it has timed out."""
        if (
            self._failed_at is None
            or self.stopping
            or now - self._failed_at < self._settle_seconds(now)
        ):
            return
        failed = frozenset(each.rank for each in self.failures)
        running = frozenset(range(self.size)) - frozenset(self.exits)
        answer = self._policy(Situation(cause.first(self.failures), failed, running))
        if isinstance(answer, Stop):
            self._stop(signal.SIGTERM, now, min(self._grace, _STOP_SECONDS))

    def _settle_seconds(self, now: float) -> float:
        """Return the seconds to wait for the cause, counted from the first failure."""
        if len(self.exits) == self.size or not all(each.may_follow for each in self.failures):
            return _SETTLE_SECONDS
        is_quiet = any(seconds > _QUIET_SECONDS for seconds in self._silence(now).values())
        return self._lost + _CAUSE_SECONDS if is_quiet else _CAUSE_SECONDS

    def _stop(self, number: int, now: float, grace: float = 0.0) -> None:
        self.stopping = True
        self.num_stopped = self.size - len(self.exits)
        self._decisions.append(SendSignal(number))
        self._kill_at = now + grace

    def _kill_when_due(self, now: float) -> None:
        if self._kill_at is not None and now > self._kill_at:
            self._kill(now)

    def _kill(self, now: float) -> None:
        self._kill_at = None
        if self._give_up_at is None:
            self._give_up_at = now + _GIVE_UP_SECONDS
        self._decisions.append(KillAll())

    def _give_up(self, now: float) -> None:
        """Count hosts as lost whose agents do not answer (stopped or blocked), to end the run."""
        self._give_up_at = now + _GIVE_UP_SECONDS
        for number, host in enumerate(self.hosts):
            if number not in self.over and any(rank not in self.exits for rank in host.ranks):
                self._lose(number, f"its agent did not answer within {_GIVE_UP_SECONDS:.0f} s", now)

    # The end.

    @property
    def exit_code(self) -> int:
        """Return the exit code of the launcher: that of the cause, if there is a failure."""
        if self.problem:
            return 2
        if self.store_failure:
            return 1
        if self.failures:
            return cause.first(self.failures).exit_code
        codes = list(self.exits.values())
        if RESUBMIT in codes:
            return RESUBMIT
        if self.signals and (any(codes) or len(codes) < self.size):
            return 128 + self.signals[0]
        return 0

    def conclusion(
        self, now: float, shows: Callable[[int], bool], *, foreground: bool
    ) -> Conclusion:
        """Return the exit code and the text to print last.

        shows: returns whether the lines of a rank were printed. foreground: the command is one of
        allstep's, whose own error line is enough.
        """
        text = self.problem or ""
        if self.store_failure and not self.problem:
            text = (
                f"allstep run: the launcher's store ended by itself ({self.store_failure}), "
                f"{now:.1f} s after the start; {self.num_stopped} of {self.size} workers "
                "were killed. "
                "This is a defect of allstep: start again, and report it"
            )
        elif self.failures and not self.problem:
            shown = [failed for failed in self.failures if shows(failed.rank)]
            if not (foreground and cause.explained_by(self.failures, shown)):
                text = cause.final_report(self.failures, shown, self.size, self.num_stopped)
        return Conclusion(self.exit_code, text)


def span(ranks: Sequence[int]) -> str:
    """Return consecutive ranks as text: `rank 3`, `ranks 2-3`."""
    if not ranks:
        return "no ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
