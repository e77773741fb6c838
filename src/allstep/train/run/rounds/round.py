"""The protocol of a round: what happens between two points at which all ranks agree.

```
loop      go ── note the tally ── position ── log ── evaluate ── save ── go ...
             \\__ Agreement: equal on all ranks
```

The loop goes from round to round. Evaluations, checkpoints, growth of the batch, stops and changes
of the world happen between two rounds only, when all ranks have the same weights and position. How
many updates a round has, and which of them wait for others, is the decision of its implementation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from allstep.data import Batch
from allstep.train.health.stop_request import Stopping
from allstep.train.run.placed_job import Job
from allstep.train.run.progress_event import Reported
from allstep.train.step.after_step import StepOutcome
from allstep.train.step.step import Clock
from allstep.train.watch.callback import Callback


@dataclass(frozen=True)
class Surroundings:
    """What a round uses of its run, in one world.

    `clock` receives the time of the phases, `reported` what a long round reports before its end.
    `must_leave_world` returns whether the launcher asked this rank to leave its world,
    `is_save_due` whether it is time for a checkpoint. `has_pushed` is called with the updates of
    this rank within a round, for elastic runs.
    """

    job: Job
    clock: Clock
    stopping: Stopping
    callbacks: Callback
    reported: Reported
    must_leave_world: Callable[[], bool]
    is_save_due: Callable[[], bool]
    has_pushed: Callable[[int], None]


@dataclass(frozen=True)
class Agreement:
    """The end of a round. All but `last` and `samples` is equal on all ranks."""

    outcome: StepOutcome
    """The sums over all ranks and all updates of the round."""
    position: int
    """Samples of the run up to the end of the round."""
    updates: int
    """Updates of the weights in the round."""
    last: Batch
    """The last share of this rank, for a report on a loss that diverged."""
    samples: int = 0
    """Samples that this rank processed."""
    lost: str = ""
    """The lost ranks and why, in a mode in which the others finish the round without them."""


class Round(Protocol):
    """The rounds of a run in one world: a new one is made for each world."""

    def go(self) -> Agreement:
        """Train from the position of the run to the end of the next round. A collective.

        The position of the job does not change; the loop moves it. An error of a rank's data is
        raised on all ranks.
        """

    def undo(self) -> None:
        """Return to the state after the last `go`, since the present one failed; not a collective.

        Only an elastic run needs it, when a rank is lost.
        """

    def close(self) -> None:
        """End the loop over the data. The object may not be used again."""
