"""A simulated elastic job: workers and hosts that react to the roster's actions, and fail.

`Simulation` has the truth: what each worker does at each moment. The roster learns of it through
events, later and in the order of each worker. `Checks` compares every action with the truth.
"""

import heapq
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random

from allstep.launch.roster import Policy, Roster
from allstep.launch.roster.actions import (
    Action,
    Dismiss,
    EndGeneration,
    FinishRun,
    ForwardSignal,
    KillWorker,
    NotifyChange,
    Plan,
    Publish,
    SaveAndExit,
    StartWorker,
)
from allstep.launch.roster.elastic_state import Stage
from allstep.launch.roster.roster_events import (
    Event,
    HostLost,
    HostsFound,
    HostsSignaled,
    Progress,
    Ready,
    Standby,
    StartFailed,
    WorkerExited,
)

HostList = tuple[tuple[str, int], ...]
WAITING = ("starting", "standby", "ready")


@dataclass(frozen=True)
class Fault:
    """Something that happens `delay` seconds after the fault before; `which` chooses its victim."""

    delay: float
    kind: str
    which: int = 0
    hosts: HostList = ()


@dataclass
class Process:
    """The truth about one worker."""

    number: int
    host: str
    slot: int
    phase: str = "starting"
    generation: int = -1
    updates: int = 0
    has_state: bool = False
    is_stuck: bool = False
    reported_at: float = 0.0

    @property
    def is_alive(self) -> bool:
        return self.phase != "dead"


@dataclass
class Checks:
    """The invariants of a roster, checked at each action against the truth."""

    policy: Policy
    processes: dict[int, Process]
    plan: Plan | None = None
    ended: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)
    ready: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    standby: set[int] = field(default_factory=set)
    reported_dead: set[int] = field(default_factory=set)
    slots: dict[str, int] = field(default_factory=dict)
    num_notices: int = 0
    finish: FinishRun | None = None
    due: float = float("inf")
    ended_at: float = 0.0
    exits: list[WorkerExited] = field(default_factory=list)
    has_signal: bool = False
    is_stopping: bool = False
    killed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.due = self.limit + self.policy.start_timeout - self.policy.elastic_timeout

    @property
    def limit(self) -> float:
        """The longest time from the end of a generation to a plan or the end of the run."""
        return self.policy.elastic_timeout + self.policy.grace + 10.0 + 0.001

    @property
    def longest_silence(self) -> float:
        """How long a member of a generation that has ended may be silent and stay.

        Steps of a simulation take less than 20 s, forming included. A run that begins to stop
        before that gives its members the grace time: one of them has the state to save.
        """
        answer, stop = 2.0 + max(self.policy.first_step, 20.0), self.policy.elastic_timeout
        return answer if answer < stop else max(answer, stop + self.policy.grace)

    def event(self, event: Event) -> None:
        match event:
            case HostsFound():
                self.slots = dict(event.hosts)
            case Standby():
                self.standby.add(event.worker)
            case Ready():
                self.ready[event.worker] = (event.generation, event.updates)
                self.expect_plan(event.at)
            case HostsSignaled():
                self.has_signal = True
            case WorkerExited():
                self.reported_dead.add(event.worker)
                self.exits.append(event)
                if event.code == 0 and not self.policy.replaces:
                    # Its members work on without the lost ones to their ends.
                    self.due = float("inf")
            case StartFailed():
                self.reported_dead.add(event.worker)
            case HostLost():
                self.reported_dead |= {
                    each.number for each in self.processes.values() if each.host == event.host
                }

    def action(self, action: Action, now: float, batch: Sequence[Action]) -> None:
        assert self.finish is None, "nothing follows the end of the run"
        self.is_stopping |= isinstance(action, ForwardSignal | SaveAndExit | FinishRun)
        assert not (self.is_stopping and isinstance(action, StartWorker | Publish | NotifyChange))
        if self.is_stopping:
            self.due = min(self.due, now + self.policy.grace + 10.0 + 0.001)
        match action:
            case StartWorker():
                self.start(action)
            case Publish():
                self.publish(action.plan, batch)
                self.due = float("inf")
            case EndGeneration():
                assert self.plan is not None and action.generation == self.plan.generation
                assert action.generation not in self.ended, "a generation ends once"
                self.ended.add(action.generation)
                self.expect_plan(now)
            case NotifyChange():
                assert self.plan is not None and action.generation == self.plan.generation
                assert action.generation not in self.ended
                self.num_notices += 1
                assert self.num_notices <= 2 * len(self.processes), "once for each change"
            case Dismiss() | SaveAndExit():
                truth = self.processes[action.worker]
                assert truth.phase in (*WAITING, "dead"), "only a worker that waits can be let go"
            case KillWorker():
                assert action.worker not in self.reported_dead
                assert action.worker not in self.killed, "once"
                self.killed.add(action.worker)
            case FinishRun():
                self.finish = action
                if action.conclusion.code != 0 and not self.has_signal:
                    self.check_reason(action.conclusion.text, now)

    def expect_plan(self, now: float) -> None:
        """Start the time for the next plan; without replacements, when the first member leaves."""
        if self.plan is None or self.plan.generation not in self.ended - self.counted:
            return
        if self.policy.replaces or any(self.is_now(number) for number, _ in self.ready.values()):
            self.counted.add(self.plan.generation)
            self.due, self.ended_at = now + self.limit, now

    def time(self, now: float) -> None:
        """Nothing waits longer than its limit."""
        assert now <= self.due + 0.3, "no plan within the time limits"
        has_done = any(each.code in (0, 75) for each in self.exits)
        if self.plan is None or self.plan.generation not in self.counted or has_done:
            return
        if now > self.ended_at + self.longest_silence + 0.3:
            answered = {each for each, (number, _) in self.ready.items() if self.is_now(number)}
            silent = set(self.plan.members) - answered - self.reported_dead - self.killed
            assert silent == set() or self.is_stopping, "a member that does not answer stays"

    def is_now(self, generation: int) -> bool:
        return self.plan is not None and generation == self.plan.generation

    def check_reason(self, text: str, now: float) -> None:
        """A run without a signal must have a reason to fail."""
        living = [each for each in self.processes.values() if each.is_alive]
        if "no state left" in text:
            keepers = [each for each in living if each.phase == "ready" and each.has_state]
            assert keepers == [], "a worker that holds the state is alive"
        elif "number of resets" in text:
            assert self.plan is not None and self.plan.generation == self.policy.reset_limit
        elif "are on standby" in text or "before it joined" in text:
            assert self.plan is None
        elif "workers can continue" in text or "has not ended" in text:
            assert now >= self.ended_at + self.policy.elastic_timeout
        else:
            assert self.plan is not None
            codes = [each.code for each in self.exits]
            signatures = [each.signature for each in self.exits if each.signature]
            assert 0 in codes or 75 in codes or signatures, text

    def start(self, action: StartWorker) -> None:
        assert action.worker == max(self.processes, default=-1) + 1, "numbers are never used again"
        assert 0 <= action.slot < self.slots.get(action.host, 0), "only slots that are listed"
        place = (action.host, action.slot)
        living = [each for each in self.processes if each not in self.reported_dead]
        assert place not in [(self.processes[n].host, self.processes[n].slot) for n in living]

    def publish(self, plan: Plan, batch: Sequence[Action]) -> None:
        before = self.plan.members if self.plan is not None else ()
        self.check_members(plan, before)
        self.check_left_out(plan, before, batch)
        if self.plan is not None:
            self.check_source(plan, before)
        else:
            assert plan.generation == 0 and plan.source is None
            assert len(plan.members) >= self.policy.num_workers or not self.policy.replaces
        self.plan, self.num_notices = plan, 0

    def check_members(self, plan: Plan, before: Sequence[int]) -> None:
        assert plan.generation == (-1 if self.plan is None else self.plan.generation) + 1
        assert len(set(plan.members)) == len(plan.members)
        most = self.policy.max_workers or len(plan.members)
        assert self.policy.min_workers <= len(plan.members) <= most
        assert not self.left_out & set(plan.members), "a worker that was left out returns"
        assert not self.reported_dead & set(plan.members), "a dead worker is in the plan"
        assert set(plan.new) == set(plan.members) - set(before)
        assert set(plan.new) <= self.standby, "a new member was not on standby"
        for worker in set(plan.members) & set(before):
            assert self.ready[worker][0] == plan.generation - 1, "a member has not left"
        hosts = [self.processes[worker].host for worker in plan.members]
        changes = sum(a != b for a, b in pairwise(hosts))
        assert changes == len(set(hosts)) - 1, "ranks of a host are not consecutive"

    def is_listed(self, worker: int) -> bool:
        truth = self.processes[worker]
        return truth.slot < self.slots.get(truth.host, 0)

    def check_left_out(self, plan: Plan, before: Sequence[int], batch: Sequence[Action]) -> None:
        out = set(before) - set(plan.members)
        dismissed = {each.worker for each in batch if isinstance(each, Dismiss)}
        for worker in out:
            truth = self.processes[worker]
            assert truth.phase in ("dead", "leaving"), "a worker that may act is left out"
            assert worker in dismissed or worker in self.reported_dead
        self.left_out |= out

    def check_source(self, plan: Plan, before: Sequence[int]) -> None:
        assert plan.source in before and plan.members[0] in before
        for worker in (plan.source, plan.members[0]):
            # A state without updates can be made again.
            assert self.processes[worker].has_state or plan.updates == 0
        unlisted = [worker for worker in plan.members if not self.is_listed(worker)]
        assert unlisted in ([], [plan.source]), "only a source stays on a withdrawn host"
        stay = [worker for worker in plan.members if worker in before]
        assert plan.updates == self.ready[plan.source][1]
        assert plan.updates == max(self.ready[worker][1] or 0 for worker in stay)
        old = [before.index(worker) for worker in stay if self.processes[worker].has_state]
        assert old == sorted(old) or plan.updates == 0, "survivors keep their relative order"


class Simulation:
    """A job of `num_updates` updates on hosts with faults; `seed` decides all times."""

    def __init__(
        self,
        policy: Policy,
        hosts: HostList,
        faults: Sequence[Fault],
        seed: int,
        updates: int,
        *,
        calm: bool = False,
    ) -> None:
        """calm: workers obey, and nothing happens except the faults."""
        self.random, self.is_calm = Random(seed), calm
        self.roster = Roster(policy)
        self.processes: dict[int, Process] = {}
        self.checks = Checks(policy, self.processes)
        self.policy, self.num_updates = policy, updates
        self.now = 0.0
        self.plan: Plan | None = None
        self.is_synced = False
        self.notified: set[int] = set()
        self.log: list[tuple[float, Event | Action]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._has_given_up = False
        self.later(0.0, lambda: self.report(HostsFound(self.now, hosts)))
        at = 0.0
        for fault in faults:
            at += fault.delay
            self.later(at, lambda fault=fault: self.inject(fault))

    # Time.

    def later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._order), call))

    def soon(self, longest: float) -> float:
        return self.random.random() * longest

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def mishap(self, probability: float) -> bool:
        return not self.is_calm and self.chance(probability)

    def run(self) -> FinishRun:
        for _ in range(20_000):
            if self.checks.finish is not None:
                return self.checks.finish
            self.turn()
        raise AssertionError(f"no end after {self.now} s in stage {self.roster.stage}")

    def turn(self) -> None:
        """Go to the next event or deadline, and let the roster decide."""
        next_event = self._queue[0][0] if self._queue else float("inf")
        deadline = self.roster.deadline
        moment = min(next_event, float("inf") if deadline is None else deadline)
        if moment == float("inf"):
            self.give_up()
            return
        assert moment >= self.now
        self.look_before(moment)
        self.now = moment
        # Sometimes the launcher is busy, and several events arrive at once.
        until = moment + (0.3 if self.chance(0.2) else 0.0)
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.decide()

    def look_before(self, moment: float) -> None:
        """Without an event, nothing happens before the deadline."""
        if self.chance(0.1) and moment > self.now + 1e-6:
            middle = (self.now + moment) / 2
            assert self.roster.decide(middle) == [], "an action without event or deadline"

    def give_up(self) -> None:
        """End a job that hangs by itself: a member is stuck, and no other one has noticed."""
        assert not self._has_given_up, "the roster does not end after a signal"
        assert self.roster.stage in (Stage.RUNNING, Stage.FINISHING), "the roster waits forever"
        assert self.members() or self.roster.stage is Stage.FINISHING, "no member is left"
        self._has_given_up = True
        self.later(1.0, lambda: self.report(HostsSignaled(self.now, signal.SIGTERM)))

    def decide(self) -> None:
        actions = self.roster.decide(self.now)
        self.checks.time(self.now)
        for action in actions:
            self.log.append((self.now, action))
            self.checks.action(action, self.now, actions)
            self.execute(action)

    # Events.

    def report(self, event: Event) -> None:
        self.log.append((self.now, event))
        self.checks.event(event)
        self.roster.take(event)

    def report_of(self, process: Process, make: Callable[[float], Event]) -> None:
        """Report what a worker does now, later, but in the order in which it happened."""
        delay = self.soon(0.5) if self.chance(0.3) else self.soon(0.01)
        process.reported_at = max(process.reported_at, self.now + delay)
        self.later(process.reported_at - self.now, lambda: self.deliver(make(self.now), process))

    def deliver(self, event: Event, process: Process) -> None:
        # After the loss of its host, a worker is not reported about any more.
        if process.number not in self.checks.reported_dead:
            self.report(event)

    def die(self, process: Process, code: int, signature: str = "") -> None:
        if not process.is_alive:
            return
        process.phase = "dead"
        number = process.number
        self.report_of(process, lambda at: WorkerExited(at, number, code, signature=signature))

    def leave(self, process: Process) -> None:
        """Leave the generation, if the worker can."""
        if process.phase != "member" or process.is_stuck:
            return
        process.phase = "ready"
        number, generation = process.number, process.generation
        updates = process.updates if process.has_state else self.random.choice([None, 0])
        self.report_of(process, lambda at: Ready(at, number, generation, updates))

    # The work of a world.

    def members(self) -> list[Process]:
        assert self.plan is not None
        found = [self.processes[number] for number in self.plan.members]
        return [
            each
            for each in found
            if each.phase == "member" and each.generation == self.plan.generation
        ]

    def members_at_the_end(self) -> list[Process]:
        """The workers of the last world that were not lost."""
        assert self.plan is not None
        done = {each.worker for each in self.checks.exits if each.code == 0}
        return [self.processes[number] for number in self.plan.members if number in done]

    def work(self, plan: Plan, step: float) -> None:
        """One step of a world, if all its members are there."""
        if plan is not self.plan:
            return
        members = self.members()
        if len(members) < len(plan.members) or any(each.is_stuck for each in members):
            self.notice(members)
            return
        if not self.is_synced:
            self.sync(plan, members)
        elif plan.generation in self.notified:
            for each in members:
                self.later(self.soon(0.1), lambda each=each: self.leave(each))
            return
        else:
            self.step(plan, members)
        if any(each.updates >= self.num_updates for each in members):
            self.exit_soon(members)
            return
        self.later(step, lambda: self.work(plan, step))

    def notice(self, members: Sequence[Process]) -> None:
        """Some members notice by themselves that a peer does not answer."""
        for each in members:
            if self.chance(0.3):
                self.later(self.soon(1.0), lambda each=each: self.leave(each))
            elif self.is_synced and self.chance(0.2):
                # It has received the last message of the peer and finishes the step. Before the
                # state was sent there is no step: it needs the gradients of all members.
                each.updates += each.has_state

    def sync(self, plan: Plan, members: Sequence[Process]) -> None:
        self.is_synced = True
        for each in members:
            if plan.source is not None:
                each.updates = self.processes[plan.source].updates
            each.has_state = True

    def step(self, plan: Plan, members: Sequence[Process]) -> None:
        for each in members:
            each.updates += 1
            number, generation, updates = each.number, plan.generation, each.updates
            self.report_of(
                each,
                lambda at, n=number, g=generation, u=updates: Progress(at, n, g, u),
            )

    def exit_soon(self, members: Sequence[Process]) -> None:
        for each in members:
            self.die_later(each, 1 if self.mishap(0.05) else 0, 0.5)

    # Actions.

    def execute(self, action: Action) -> None:
        match action:
            case StartWorker():
                self.start(action)
            case KillWorker():
                self.kill(self.processes[action.worker])
            case Publish():
                self.form(action.plan)
            case EndGeneration():
                self.end(action.generation)
            case NotifyChange():
                self.notified.add(action.generation)
                if not self.policy.replaces:
                    # They look for it, since no wait of theirs needs to fail.
                    self.end(action.generation)
            case Dismiss():
                self.let_go(self.processes[action.worker], self.random.choice([0, 1, -15]))
            case SaveAndExit():
                self.let_go(self.processes[action.worker], self.random.choice([75, 75, 1]))
            case ForwardSignal():
                for process in self.processes.values():
                    if self.chance(0.7) and not process.is_stuck:
                        self.die_later(process, self.random.choice([75, 0, -15]), 2.0)
            case FinishRun():
                pass

    def die_later(self, process: Process, code: int, longest: float) -> None:
        self.later(self.soon(longest), lambda: self.die(process, code))

    def start(self, action: StartWorker) -> None:
        process = Process(action.worker, action.host, action.slot)
        self.processes[action.worker] = process
        if self.mishap(0.05):
            self.later(self.soon(2.0), lambda: self.fail_to_start(process))
        elif self.mishap(0.05):
            self.die_later(process, self.random.choice([1, -9]), 3.0)
        else:
            self.later(self.soon(5.0), lambda: self.register(process))

    def fail_to_start(self, process: Process) -> None:
        if process.phase == "starting":
            process.phase = "dead"
            self.report_of(process, lambda at: StartFailed(at, process.number, "no ssh"))

    def register(self, process: Process) -> None:
        if process.phase == "starting":
            process.phase = "standby"
            self.report_of(process, lambda at: Standby(at, process.number))

    def kill(self, process: Process) -> None:
        # A process that waits for a broken disk cannot be killed.
        if not self.mishap(0.02):
            self.die_later(process, -9, 0.2)

    def form(self, plan: Plan) -> None:
        self.plan, self.is_synced = plan, False
        for number in plan.members:
            process = self.processes[number]
            if process.is_alive:
                process.phase, process.generation = "member", plan.generation
                process.has_state |= plan.source is None
        if plan.source is not None and self.mishap(0.15):
            # Often before the others have received its state.
            self.die_later(self.processes[plan.source], -9, 1.0)
        step = self.random.choice([0.02, 0.5, 5.0])
        self.later(self.soon(1.0), lambda: self.work(plan, step))

    def end(self, generation: int) -> None:
        for process in self.members():
            if self.mishap(0.05):
                self.die_later(process, 1, 1.0)
            else:
                longest = 40.0 if self.mishap(0.1) else 1.5
                self.later(self.soon(longest), lambda process=process: self.leave(process))

    def let_go(self, process: Process, code: int) -> None:
        if process.is_alive:
            process.phase = "leaving"
            if not self.mishap(0.1):
                self.die_later(process, code, 3.0)

    # Faults.

    def inject(self, fault: Fault) -> None:
        living = [each for each in self.processes.values() if each.is_alive]
        if fault.kind == "hosts":
            self.report(HostsFound(self.now, fault.hosts))
        elif fault.kind == "signal":
            self.report(HostsSignaled(self.now, signal.SIGTERM))
        elif living:
            self.strike(fault.kind, living[fault.which % len(living)])

    def strike(self, kind: str, victim: Process) -> None:
        match kind:
            case "kill":
                self.die(victim, -9)
            case "error":
                self.die(victim, 1, signature="ValueError at line 3")
            case "stuck":
                victim.is_stuck = True
            case "leave":
                self.leave(victim)
            case "lose host":
                self.lose(victim.host)
            case "signal host":
                self.report(HostsSignaled(self.now, signal.SIGUSR1, (victim.host,)))

    def lose(self, host: str) -> None:
        """The agent kills its workers first; the launcher gives the host up later."""
        for process in self.processes.values():
            if process.host == host:
                process.phase = "dead"
        self.report(HostLost(self.now, host, "no sign of life for 10 s"))
