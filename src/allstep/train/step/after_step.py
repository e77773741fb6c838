"""The exchange of the ranks in a step: one small sum, together with the running statistics.

It is the last collective of a step. The update of the weights follows it, so that all ranks update
or none (D15).

```
each rank    StepReport    tally of its share, stop request, whether its input failed, its samples
                           and whether it was asked to leave its world
all ranks    StepOutcome   tally of the whole batch, whether any rank stops, failed or leaves,
                           samples of each rank
```

The sum uses torch's default process group. Gradients and norms have process groups of their own, so
that none of them waits for operations of another.
"""

from dataclasses import dataclass

from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.task.task import Tally
from allstep.world import World


@dataclass(frozen=True)
class StepReport:
    """What one rank reports about its step."""

    tally: Tally
    samples: int
    """Samples in this rank's share of the batch; may be 0."""
    wants_stop: bool = False
    failed: bool = False
    """Whether this rank had no valid share, so that all ranks must end with its error."""
    wants_change: bool = False
    """Whether the launcher of an elastic run asked this rank to leave the world after the step."""


@dataclass(frozen=True)
class StepOutcome:
    """The sum of all ranks' reports; equal on all ranks."""

    tally: Tally
    stop: bool
    """Whether any rank wants to stop."""
    failed: bool
    """Whether any rank failed."""
    change: bool = False
    """Whether any rank was asked to leave the world, so that all leave it after this step."""
    samples: tuple[float, ...] = ()
    """Samples of each rank; empty unless `AfterStep` has `by_rank`."""


class AfterStep:
    """The exchange after each step.

    `by_rank` also exchanges how many samples each rank had, which the noise scale needs.
    """

    def __init__(self, statistics: RunningStatistics, world: World, by_rank: bool = False) -> None:
        self.statistics, self.world, self.by_rank = statistics, world, by_rank

    def exchange(self, report: StepReport) -> StepOutcome:
        """Make the running statistics equal on all ranks. Return the sum of all reports."""
        sums = report.tally.sums()
        flags = [report.wants_stop, report.failed, report.wants_change]
        own = [*sums, *flags, *self._own_samples(report.samples)]
        total = self.statistics.average(report.samples, own)
        first, last = len(sums), len(sums) + len(flags)
        stop, failed, change = (value > 0 for value in total[first:last])
        tally = report.tally.with_sums(total[:first])
        return StepOutcome(tally, stop, failed, change, tuple(total[last:]))

    def _own_samples(self, samples: int) -> list[int]:
        """Return a value per rank, zero except for this rank's, so that the sum has all ranks'."""
        if not self.by_rank:
            return []
        return [samples if rank == self.world.rank else 0 for rank in range(self.world.size)]
