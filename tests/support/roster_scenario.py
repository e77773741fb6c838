"""A roster that a test drives by hand: events at times, and the actions that follow."""

from allstep.launch.roster import Policy, Roster
from allstep.launch.roster.actions import Action, FinishRun, Plan, Publish, StartWorker
from allstep.launch.roster.roster_events import (
    Event,
    HostsFound,
    Progress,
    Ready,
    Standby,
    WorkerExited,
)


def listed(text: str) -> tuple[tuple[str, int], ...]:
    """`a:2 b:1` as a list of hosts."""
    pairs = (item.split(":") for item in text.split())
    return tuple((label, int(slots)) for label, slots in pairs)


class Scenario:
    """A run on hosts such as `a:2 b:2`; workers are numbered in this order."""

    def __init__(
        self, hosts: str = "a:2 b:2", num: int = 4, least: int = 1, most: int | None = None, **more
    ) -> None:
        self.roster = Roster(Policy(num, least, most, **more))
        self.now = 0.0
        self.started: list[StartWorker] = []
        self.at(0.0, HostsFound(0.0, listed(hosts)))

    def at(self, now: float, *events: Event) -> list[Action]:
        """Decide at a time, after events."""
        self.now = now
        for event in events:
            self.roster.take(event)
        actions = self.roster.decide(now)
        self.started += [each for each in actions if isinstance(each, StartWorker)]
        return actions

    def running(self, workers: int = 4, at: float = 1.0, steps: int = 3) -> "Scenario":
        """Form generation 0 of the first workers; they finish steps of 0.1 s."""
        self.standby(at, *range(workers))
        assert self.plan.members == tuple(range(workers))
        for step in range(1, steps + 1):
            self.progress(at + 0.1 * step, step, *self.plan.members)
        return self

    def standby(self, now: float, *workers: int) -> list[Action]:
        return self.at(now, *(Standby(now, worker) for worker in workers))

    def progress(self, now: float, updates: int, *workers: int) -> list[Action]:
        generation = self.plan.generation
        events = (Progress(now, worker, generation, updates) for worker in workers)
        return self.at(now, *events)

    def ready(self, now: float, *workers: int, updates: int | None = 3) -> list[Action]:
        generation = self.plan.generation
        return self.at(now, *(Ready(now, worker, generation, updates) for worker in workers))

    def exits(self, now: float, worker: int, code: int = -9, **more) -> list[Action]:
        return self.at(now, WorkerExited(now, worker, code, **more))

    @property
    def plan(self) -> Plan:
        assert self.roster.plan is not None
        return self.roster.plan


def published(actions: list[Action]) -> Plan:
    (plan,) = [each.plan for each in actions if isinstance(each, Publish)]
    return plan


def finished(actions: list[Action]) -> tuple[int, str]:
    """The exit code and the text of the end of a run."""
    (end,) = [each.conclusion for each in actions if isinstance(each, FinishRun)]
    return end.code, end.text


def of_type(actions: list[Action], *kinds: type) -> list[Action]:
    return [each for each in actions if isinstance(each, kinds)]
