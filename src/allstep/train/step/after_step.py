"""What the ranks exchange after a step, in one small sum together with the running statistics.

```
each rank    StepReport    tally of its share, stop request, whether its input failed, its samples
all ranks    StepOutcome   tally of the whole batch, whether any rank stops or failed, samples by rank
```

The sum uses torch's default process group. Gradients and norms have groups of their own, so that
none of them waits for operations of another.
"""

from dataclasses import dataclass

from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.task.task import Tally
from allstep.world import World


@dataclass(frozen=True)
class StepReport:
    """The step of one rank."""

    tally: Tally
    samples: int
    """Of this rank's share of the batch; may be 0."""
    wants_stop: bool = False
    failed: bool = False
    """Whether this rank had no valid share, so that all ranks must end with its error."""


@dataclass(frozen=True)
class StepOutcome:
    """The step of all ranks; equal on each of them."""

    tally: Tally
    stop: bool
    """Whether any rank wants to stop."""
    failed: bool
    """Whether any rank failed."""
    samples: tuple[float, ...] = ()
    """Of each rank; empty unless `AfterStep` was asked for them."""


class AfterStep:
    """The exchange after each step.

    by_rank: also share how many samples each rank had, which the noise scale needs.
    """

    def __init__(self, statistics: RunningStatistics, world: World, by_rank: bool = False) -> None:
        self.statistics, self.world, self.by_rank = statistics, world, by_rank

    def exchange(self, report: StepReport) -> StepOutcome:
        """Make the running statistics equal on all ranks, and return what all ranks reported."""
        sums = report.tally.sums()
        own = [*sums, report.wants_stop, report.failed, *self._own_samples(report.samples)]
        total = self.statistics.average(report.samples, own)
        count = len(sums)
        stop, failed = (value > 0 for value in total[count : count + 2])
        return StepOutcome(
            report.tally.with_sums(total[:count]), stop, failed, tuple(total[count + 2 :])
        )

    def _own_samples(self, samples: int) -> list[int]:
        """A row with a place for each rank, zero but for ours: the sum has every rank's samples."""
        if not self.by_rank:
            return []
        return [samples if rank == self.world.rank else 0 for rank in range(self.world.size)]
