"""The living workers of an elastic run, each in one phase.

```
            Standby              Publish           Ready
  STARTING ----------> STANDBY ----------> MEMBER ------> READY --Publish--> MEMBER
      |                   |                                 |
      +--------- Dismiss -+-----------> LEAVING <--Dismiss--+
```

A worker is removed when it has ended, from any phase; its number is never used again. Only a worker
that waits can be dismissed: a member may still act, so it must become ready or be killed first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from allstep.launch.roster.slots import Place


class Phase(Enum):
    """What a living worker does."""

    STARTING = auto()
    STANDBY = auto()
    MEMBER = auto()
    READY = auto()
    LEAVING = auto()


@dataclass
class LivingWorker:
    """A process that the roster has started and that has not ended.

    updates: how many its state contains. holds_state: that state is whole, as far as a ready member
    is concerned. step_seconds: time of its last step. has_stepped: it has finished a step in its
    generation. is_killed: SIGKILL was sent. is_excused: its
    end is no failure, because the roster caused it.
    """

    number: int
    place: Place
    started_at: float
    phase: Phase = Phase.STARTING
    updates: int = 0
    holds_state: bool = False
    step_seconds: float | None = None
    has_stepped: bool = False
    working_since: float = 0.0
    is_killed: bool = False
    is_excused: bool = False
    leave_by: float = float("inf")

    @property
    def host(self) -> str:
        """Return the label of its host."""
        return self.place[0]

    def join(self, at: float) -> None:
        """Make it a member of the plan that was published at that time."""
        self.phase = Phase.MEMBER
        self.working_since, self.has_stepped = at, False

    def leave_generation(self, updates: int | None, expected: int) -> None:
        """Make it ready for the next plan.

        updates: as in the event `Ready`. expected: the least number in a state that it has received
        in this generation, 0 if it needed none.
        """
        self.phase = Phase.READY
        self.holds_state = updates is not None and updates >= expected
        self.updates = updates or 0

    def finish_step(self, at: float, updates: int) -> None:
        """Record a finished step, whose time counts from the step before or from the plan."""
        self.updates = updates
        self.step_seconds = at - self.working_since
        self.working_since, self.has_stepped = at, True


class LivingWorkers:
    """The living workers by number."""

    def __init__(self) -> None:
        self._living: dict[int, LivingWorker] = {}
        self._next = 0

    def start(self, place: Place, at: float) -> LivingWorker:
        """Add a worker with the next number."""
        worker = LivingWorker(self._next, place, at)
        self._living[worker.number] = worker
        self._next += 1
        return worker

    def get(self, number: int) -> LivingWorker | None:
        """Return a living worker, or None."""
        return self._living.get(number)

    def remove(self, number: int) -> LivingWorker | None:
        """Remove and return a worker that has ended, or None if it was removed before."""
        return self._living.pop(number, None)

    def __iter__(self) -> Iterator[LivingWorker]:
        return iter(list(self._living.values()))

    def __len__(self) -> int:
        return len(self._living)

    @property
    def num_started(self) -> int:
        """Return how many workers were started, those that have ended included."""
        return self._next

    def having(self, *phases: Phase) -> list[LivingWorker]:
        """Return the workers in one of the phases."""
        return [worker for worker in self if worker.phase in phases]

    def on(self, host: str) -> list[LivingWorker]:
        """Return the workers of a host."""
        return [worker for worker in self if worker.host == host]

    @property
    def taken(self) -> set[Place]:
        """Return the slots with a living process."""
        return {worker.place for worker in self}
