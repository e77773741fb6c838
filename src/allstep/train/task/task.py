"""The seam between training and what is learned.

```
model(input) ──> outputs ──┬─> training_losses   of each sample: the loop sums, weighs and divides
                           └─> loss_sum, Tally   sums over samples, added over steps and ranks
                                    |
                                  Score ──> Metric   which of two scores is better
```

A task returns sums, never means: the loop divides once, by the samples of all ranks, so any number
of workers computes the same. The loop owns backward, optimizer, precision and the exchange of
gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from torch import Tensor

from allstep.data import Batch, Loader
from allstep.train.watch.events import Score


@dataclass(frozen=True)
class Metric:
    """One figure of a score, and which direction is better."""

    name: str
    """The attribute of the score."""
    higher_is_better: bool

    def of(self, score: Score) -> float:
        """Return the figure."""
        value: float = getattr(score, self.name)
        return value

    def is_better(self, score: Score, best: Score | None) -> bool:
        """Return whether a score is better than the best so far; the first one is."""
        return best is None or self._sign * self.of(score) > self._sign * self.of(best)

    def reaches(self, score: Score, goal: float) -> bool:
        """Return whether a score is as good as `goal`, or better."""
        return self._sign * self.of(score) >= self._sign * goal

    @property
    def _sign(self) -> int:
        return 1 if self.higher_is_better else -1


class Tally(Protocol):
    """Sums over samples. Adding tallies of disjoint samples gives the tally of them all."""

    loss: float
    """The sum of the losses."""
    count: float
    """How many samples."""

    def add(self, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        """Count some samples, given the sum of their losses."""

    def __add__(self, other: Self) -> Self:
        """Return the tally of both."""

    def sums(self) -> list[float]:
        """Return plain numbers, to be sent and added; `with_sums` is the way back."""

    def with_sums(self, sums: Sequence[float]) -> Self:
        """Return a tally of the same kind with other sums."""

    def score(self) -> Score:
        """Return the means; of no samples they are 0."""


class Task(Protocol):
    """What is learned."""

    @property
    def input(self) -> Literal["images"]:
        """What a sample is before the model gets it."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Figures of a score. The first one decides which model is best, and when to stop early."""

    def tally(self) -> Tally:
        """Return an empty tally."""

    def training_losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample, of which training takes the gradient."""

    def loss_sum(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the losses as an evaluation counts them."""

    def check_targets(self, batch: Batch, loader: Loader) -> None:
        """Raise DataError that names the first sample whose target is not of this task."""
