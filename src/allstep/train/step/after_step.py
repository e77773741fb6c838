"""The exchange of the ranks in a step: one small sum, together with the running statistics.

It is the last collective of a step. The update of the weights follows it, so that all ranks update
or none (D15).

```
each rank    StepReport    tally of its share, stop request, whether its input failed, its samples
                           and seconds, and whether it was asked to leave its world
all ranks    StepOutcome   tally of the whole batch, whether any rank stops, failed or leaves,
                           samples and seconds of each rank
```

The sum uses torch's default process group. Gradients and norms have process groups of their own, so
that none of them waits for operations of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.task.tally import Tally
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
    seconds: float = 0.0
    """Seconds of this rank for the input and computation of its share."""
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
    """Samples of each rank; empty unless `AfterStep` has "samples" in `by_rank`."""
    seconds: tuple[float, ...] = ()
    """Seconds of each rank; empty unless `AfterStep` has "seconds" in `by_rank`."""


class AfterStep:
    """The exchange after each step.

    `by_rank` names the fields of the reports that all ranks get from each other: "samples", which
    the noise scale needs, and "seconds", which the shares by speed need as well.
    """

    def __init__(
        self, statistics: RunningStatistics, world: World, by_rank: Sequence[str] = ()
    ) -> None:
        self.statistics, self.world, self.by_rank = statistics, world, by_rank

    def exchange(self, report: StepReport) -> StepOutcome:
        """Make the running statistics equal on all ranks. Return the sum of all reports."""
        sums = report.tally.sums()
        flags = [report.wants_stop, report.failed, report.wants_change]
        total = self.statistics.average(report.samples, [*sums, *flags, *self._own(report)])
        first, last, size = len(sums), len(sums) + len(flags), self.world.size
        stop, failed, change = (value > 0 for value in total[first:last])
        starts = range(last, len(total), size)
        by_rank = {
            name: tuple(total[start : start + size])
            for name, start in zip(self.by_rank, starts, strict=True)
        }
        return StepOutcome(report.tally.with_sums(total[:first]), stop, failed, change, **by_rank)

    def _own(self, report: StepReport) -> list[float]:
        """Return values per rank, zero except for this rank's, so that the sum has all ranks'."""
        size = self.world.size
        own = [0.0] * (size * len(self.by_rank))
        for number, name in enumerate(self.by_rank):
            own[size * number + self.world.rank] = getattr(report, name)
        return own
