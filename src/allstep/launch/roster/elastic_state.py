"""The state of an elastic run, and the small changes that several rules need.

`on_event` changes it for an event, `over_time` for the time that has passed; both leave actions in
`actions`. The stages are explained in `roster`.
"""

from enum import Enum, auto

from allstep.launch.roster import conclusions
from allstep.launch.roster.actions import (
    Action,
    Dismiss,
    EndGeneration,
    FinishRun,
    KillWorker,
    Plan,
    SaveAndExit,
)
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.form_plan import Candidates, source_of
from allstep.launch.roster.living_workers import LivingWorker, LivingWorkers, Phase
from allstep.launch.roster.losses import Losses
from allstep.launch.roster.slots import Slots
from allstep.launch.roster.stopping import Stopping
from allstep.launch.run_events import Conclusion

# A dismissed worker that has not exited after this time is killed.
_LEAVE_SECONDS = 10.0

WAITING = (Phase.STARTING, Phase.STANDBY)
"""Phases of workers that were in no plan yet."""
IN_PLAN = (Phase.MEMBER, Phase.READY)
"""Phases of workers that are in the current plan."""


class Stage(Enum):
    """The stages of a run; `roster` has a diagram."""

    STARTING = auto()
    RUNNING = auto()
    CHANGING = auto()
    ENDED = auto()
    FINISHING = auto()
    STOPPING = auto()
    OVER = auto()


FORMING = (Stage.CHANGING, Stage.ENDED)
"""Stages in which members become ready for the next plan."""
WORKING = (Stage.STARTING, Stage.RUNNING, *FORMING)
"""Stages that lead to another plan."""


class ElasticState:
    """The state of one elastic run.

    announced: workers that join or leave, as far as the members were notified. since: start of the
    wait of a stage. reason: why the current generation is over. has_cause: `reason` is the cause,
    and not a consequence. has_ended: its members were asked to leave it at once. doomed_at: time of
    an error of the program. left_with: exit codes of the members of this generation that left with
    their hosts. keeper, is_done: in a run that continues without lost workers, the member whose
    exit with 0 decides, and whether it has done so (`continuing`).
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.stage = Stage.STARTING
        self.plan: Plan | None = None
        self.workers = LivingWorkers()
        self.slots = Slots(policy)
        self.losses = Losses()
        self.announced: set[int] = set()
        self.since = 0.0
        self.reason = ""
        self.has_ended = False
        self.has_cause = False
        self.doomed_at: float | None = None
        self.left_with: set[int] = set()
        self.keeper: int | None = None
        self.is_done = False
        self.stopping: Stopping | None = None
        self.actions: list[Action] = []

    # Questions.

    @property
    def generation(self) -> int:
        """Return the number of the current generation, -1 before the first."""
        return -1 if self.plan is None else self.plan.generation

    def rank_of(self, worker: LivingWorker) -> int:
        """Return the rank of a member in the current plan; the number of another worker."""
        if self.plan is None or worker.number not in self.plan.members:
            return worker.number
        return self.plan.members.index(worker.number)

    def name_of(self, worker: LivingWorker) -> str:
        """Return a member as text: `rank 2 on host`."""
        return f"rank {self.rank_of(worker)} on {worker.host}"

    def is_offered(self, worker: LivingWorker, now: float) -> bool:
        """Return whether a worker may stay: its host still offers the slot."""
        return self.slots.offers(worker.place, now)

    def in_slot_order(self, workers: list[LivingWorker]) -> list[LivingWorker]:
        """Return workers in the order of their hosts' discovery, then of their slots."""
        hosts = self.slots.hosts
        return sorted(workers, key=lambda each: (hosts.index(each.host), each.place[1]))

    def candidates(self, now: float) -> Candidates:
        """Return the workers from which the next world can be formed."""
        living = [worker for worker in self.workers if not worker.is_killed]
        ready = [worker for worker in living if worker.phase is Phase.READY]
        standby = [worker for worker in living if worker.phase is Phase.STANDBY]
        return Candidates(
            sorted(ready, key=self.rank_of),
            self.in_slot_order(standby),
            lambda worker: self.is_offered(worker, now),
            self.slots.hosts,
        )

    def may_act(self) -> list[LivingWorker]:
        """Return the members that may still act: no plan can leave them out.

        A killed worker counts until it has exited, also if it got ready in the meantime.
        """
        members = self.workers.having(*IN_PLAN)
        return [each for each in members if each.phase is Phase.MEMBER or each.is_killed]

    def verdict(self) -> Conclusion | None:
        """Return the failure that decides how the run ends; None while there is none."""
        if self.doomed_at is None and (self.stage is not Stage.FINISHING or self.is_done):
            return None
        if self.plan is not None and self.losses.of_members:
            num_left = len(self.workers.having(*IN_PLAN))
            return conclusions.failed(self.losses.failures, len(self.plan.members), num_left)
        if self.plan is None and self.losses.before_joining:
            return conclusions.before_joining(self.losses.before_joining)
        return None

    # Changes.

    def end_generation(self, at: float, reason: str, *, is_cause: bool = True) -> None:
        """Ask the members of the current generation to leave it at once, if not done before.

        is_cause: `reason` is the cause of the end. Otherwise it is replaced by the first cause: a
        member may report a lost peer before the exit of that peer is known here.
        """
        if self.plan is None or self.stopping is not None:
            return
        self.give_reason(reason, is_cause=is_cause)
        if not self.has_ended:
            self.has_ended, self.since = True, at
            self.actions.append(EndGeneration(self.plan.generation, reason))
        # Without a member that waits for the others, they need not leave in time (`continuing`).
        must_leave = self.policy.replaces or self.workers.having(Phase.READY)
        is_over = must_leave or not self.workers.having(Phase.MEMBER)
        if is_over and self.stage in (Stage.RUNNING, Stage.CHANGING):
            self.stage, self.since = Stage.ENDED, at

    def give_reason(self, reason: str, *, is_cause: bool = True) -> None:
        """Record why the current generation is over; the first cause counts."""
        if not self.has_cause and (is_cause or not self.has_ended):
            self.reason, self.has_cause = reason, is_cause

    def doom(self, at: float) -> None:
        """Record an error of the program, which ends the run once its cause is known."""
        if self.stage in WORKING and self.doomed_at is None:
            self.doomed_at = at

    def exclude(self, worker: LivingWorker, at: float, *, did_not_start: bool = False) -> None:
        """Leave the slot of a failed worker empty for a while; under `blacklist` its whole host.

        did_not_start: its host could not start it, which is not a failure of the worker.
        """
        if self.stage not in WORKING:
            return
        if not self.policy.blacklist:
            # A host that is away, or not ready yet, may return after hours.
            counts = self.plan is None or not did_not_start
            self.slots.fail(worker.place, at, counts=counts)
        elif self.is_offered(worker, at):
            self.slots.blacklist(worker.host, at)
            for other in self.workers.on(worker.host):
                other.is_excused = True
                self.kill(other)

    def kill(self, worker: LivingWorker) -> None:
        """Kill a worker, once."""
        if not worker.is_killed:
            worker.is_killed = True
            self.actions.append(KillWorker(worker.number))

    def dismiss(self, worker: LivingWorker, at: float) -> None:
        """Let a worker that waits exit; its exit code is ignored."""
        worker.phase, worker.is_excused = Phase.LEAVING, True
        worker.leave_by = at + _LEAVE_SECONDS
        if not worker.is_killed:
            self.actions.append(Dismiss(worker.number))

    def release_waiting(self, now: float) -> None:
        """Let all workers of a run that stops exit, if they wait for a plan.

        One of those that hold the state saves it, unless a member still works or one has saved: two
        workers must not write one checkpoint.
        """
        assert self.stopping is not None
        candidates = self.candidates(now)
        for worker in self.workers.having(*WAITING):
            self.dismiss(worker, now)
        has_members = any(not each.is_killed for each in self.workers.having(Phase.MEMBER))
        for worker in candidates.ready:
            is_source = worker is source_of(candidates.holders or candidates.ready)
            saves = is_source and not has_members and not self.stopping.has_writer
            self.stopping.has_writer |= saves
            worker.phase = Phase.LEAVING
            self.actions.append(SaveAndExit(worker.number, saves))

    def stop(self, stopping: Stopping) -> None:
        """Begin to end the run."""
        self.stage, self.stopping = Stage.STOPPING, stopping

    def take_actions(self) -> list[Action]:
        """Remove and return the actions, without those for workers that have ended since."""
        actions, self.actions = self.actions, []
        return [each for each in actions if not self._is_pointless(each)]

    def _is_pointless(self, action: Action) -> bool:
        if not isinstance(action, KillWorker | Dismiss | SaveAndExit):
            return False
        return self.workers.get(action.worker) is None

    def finish(self, conclusion: Conclusion) -> None:
        """End the run."""
        self.stage = Stage.OVER
        self.actions.append(FinishRun(conclusion, tuple(self.losses.failures)))
