"""The state of an elastic run, as the launcher's loop uses it.

It has the interface of `RunState`. The roster decides about workers; links, silent hosts, the store
and problems of hosts are translated here into the roster's events.
"""

from collections.abc import Callable, Sequence

from allstep.launch import cause
from allstep.launch.roster.actions import Action, FinishRun
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.roster import Roster
from allstep.launch.roster.roster_events import (
    HostLost,
    HostsFound,
    HostsSignaled,
    Progress,
    Ready,
    Standby,
    StartFailed,
    WorkerExited,
)
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
    Signaled,
    StoreEnded,
)
from allstep.launch.run_state import HostRanks
from allstep.launch.signals.by_host import SignalsByHost

# The loop decides at least once a second; after a longer pause the launcher itself did not run.
_PAUSE_SECONDS = 2.0


class ElasticRun:
    """The state of one elastic run. hosts: in the order of their numbers; lost: as for RunState.

    finds_hosts: hosts may come later, so a host that cannot be used does not end the run.
    """

    def __init__(
        self,
        hosts: Sequence[HostRanks],
        policy: Policy,
        lost: float,
        *,
        finds_hosts: bool = False,
    ) -> None:
        self.hosts = list(hosts)
        self._finds_hosts = finds_hosts
        self.roster = Roster(policy)
        self.problem: str | None = None
        self.greeted: set[int] = set()
        self.over: set[int] = set()
        self.started = False
        self._lost = lost
        self._alive = [0.0 for _ in hosts]
        self._decided_at = 0.0
        # Why the links to hosts have ended that are not lost yet.
        self._ended_links: dict[int, str] = {}
        self.may_act: Callable[[str], bool] = lambda label: False
        """Whether a worker on the host of this label may still act; the launcher sets it."""
        self._signals = SignalsByHost()
        self._decisions: list[Decision] = []
        self._conclusion: Conclusion | None = None

    # Events.

    def add_host(self, host: HostRanks, now: float) -> None:
        """Add a host whose agent was started, with the next number."""
        self.hosts.append(host)
        self._alive.append(now)

    def note_alive(self, host: int, now: float) -> None:
        """Record a sign of life of a host at time `now`."""
        self._alive[host] = now

    def start(self) -> None:
        """Record that workers may be started."""
        self.started = True

    def offer(self, slots: Sequence[tuple[str, int]], now: float) -> None:
        """Offer the slots of the hosts to the roster."""
        self.roster.take(HostsFound(now, tuple(slots)))

    def take(self, event: Event) -> None:
        """Record an event of a host, a worker or the launcher."""
        match event:
            case Greeted():
                self.greeted.add(event.host)
            case Exited():
                self.roster.take(_exit_of(event))
            case LinkEnded():
                self._link_ended(event)
            case Refused() if self.may_go_without_a_host:
                self._lose(event.host, event.text, event.at)
            case Refused():
                self._end_with(event.text)
            case StoreEnded():
                self._end_with(f"the launcher's store ended by itself ({event.reason})")
            case Signaled():
                self.roster.take(HostsSignaled(event.at, event.number))
            case HostSignaled():
                self._signals.add(event.number, event.host, event.at)

    def report(self, event: Standby | Ready | Progress | StartFailed) -> None:
        """Record what a worker has reported through the store, or that it cannot be started."""
        self.roster.take(event)

    def _link_ended(self, event: LinkEnded) -> None:
        if event.host in self.over:
            return
        if event.host not in self.greeted and not self.may_go_without_a_host:
            self._end_with(event.why)
        self._ended_links[event.host] = event.why

    @property
    def may_go_without_a_host(self) -> bool:
        """Return whether a host that cannot be used does not end the run.

        That is so once there is a world, and if others may be found.
        """
        return self.started and (self._finds_hosts or self.roster.plan is not None)

    def _lose(self, host: int, why: str, now: float) -> None:
        if host in self.over:
            return
        self.over.add(host)
        self._decisions.append(LeaveHost(host, lost=True, why=why))
        self.roster.take(HostLost(now, self.hosts[host].label, why))

    def _end_with(self, problem: str) -> None:
        """End the run with a problem that no other worker can solve."""
        if self.problem is None:
            self.problem = problem
            self._decisions.append(KillAll())

    # Decisions.

    def decide(self, now: float) -> list[Decision | Action]:
        """Return what to do now."""
        since, self._decided_at = now - self._decided_at, now
        if since > _PAUSE_SECONDS:
            self._alive = [min(now, at + since) for at in self._alive]
        self._lose_ended_hosts(now)
        self._lose_silent_hosts(now)
        self._pass_signals_on(now)
        decisions: list[Decision | Action] = [*self._decisions]
        self._decisions = []
        for action in self.roster.decide(now):
            if isinstance(action, FinishRun):
                self._conclusion = action.conclusion
            else:
                decisions.append(action)
        return decisions

    def decide_while_blocked(self, now: float) -> list[Decision | Action]:
        """Decide while the loop waits for a reader of its output and reads no link."""
        return self.decide(now)

    def _lose_ended_hosts(self, now: float) -> None:
        """Lose hosts whose link has ended, once their workers cannot act any more.

        The end of an agent ends its workers, but a link also ends when only ssh does. The agent
        then kills them, at the latest when it has received nothing for 0.7 of `lost`.
        """
        for host, why in tuple(self._ended_links.items()):
            is_silent = now - self._alive[host] > self._lost
            if is_silent or not self.may_act(self.hosts[host].label):
                del self._ended_links[host]
                self._lose(host, why, now)

    def _pass_signals_on(self, now: float) -> None:
        """Pass on the signals to all hosts, or to some, that agents have reported."""
        for number, hosts in self._signals.take(now, self.greeted - self.over):
            labels = None if hosts is None else tuple(self.hosts[each].label for each in hosts)
            self.roster.take(HostsSignaled(now, number, labels))

    def _lose_silent_hosts(self, now: float) -> None:
        for number, host in enumerate(self.hosts):
            is_watched = host.remote and number in self.greeted and number not in self.over
            if is_watched and now - self._alive[number] > self._lost:
                self._lose(number, f"no sign of life for {now - self._alive[number]:.0f} s", now)

    def must_end(self, now: float) -> bool:
        """Return whether the run is over although output waits for a reader."""
        return self.is_over

    @property
    def has_deadline(self) -> bool:
        """Return whether time alone may lead to a decision soon."""
        is_waiting = self._signals.is_waiting or bool(self._ended_links)
        return self.started and (is_waiting or self.roster.deadline is not None)

    @property
    def may_start(self) -> bool:
        """Return whether workers may be started."""
        return self.problem is None

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing left to wait for."""
        return self.problem is not None or self._conclusion is not None

    def conclusion(
        self, now: float, shows: Callable[[int], bool], *, foreground: bool
    ) -> Conclusion:
        """Return the exit code and the text to print last."""
        return self._conclusion or Conclusion(1, "allstep run: the run did not start")


def _exit_of(event: Exited) -> WorkerExited:
    failed = cause.Failure(event.rank, "", event.code, event.at, event.errors)
    lines = cause.last_error_lines(event.errors) if failed.has_traceback else []
    return WorkerExited(
        event.at,
        event.rank,
        event.code,
        event.errors,
        event.out_of_memory,
        event.blames,
        "\n".join(lines),
    )
