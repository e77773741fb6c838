"""The interface between training and what is learned.

```
model(input) ──> outputs ──┬─> training_losses   one per sample; the loop weighs, sums and divides
                           └─> loss_sum, Tally   sums over samples, added over steps and ranks
                                    |
                                  Score ──> Metric   which of two scores is better
```

A task returns sums, never means: the loop divides once, by the number of samples of all ranks, so
that any number of workers computes the same. Backward pass, optimizer, precision and the exchange
of gradients belong to the loop.
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
    """The name of the attribute of `Score`."""
    higher_is_better: bool

    def of(self, score: Score) -> float:
        """Return the value of this metric in `score`."""
        value: float = getattr(score, self.name)
        return value

    def is_better(self, score: Score, best: Score | None) -> bool:
        """Return whether `score` is better than `best`, the best so far; True for the first."""
        return best is None or self._sign * self.of(score) > self._sign * self.of(best)

    def reaches(self, score: Score, goal: float) -> bool:
        """Return whether `score` is at least as good as `goal`."""
        return self._sign * self.of(score) >= self._sign * goal

    @property
    def _sign(self) -> int:
        return 1 if self.higher_is_better else -1


class Tally(Protocol):
    """Sums over samples. Adding tallies of disjoint samples gives the tally of them all."""

    loss: float
    """The sum of the losses."""
    count: float
    """The number of samples."""

    def add(self, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        """Add samples, given the sum of their losses."""

    def __add__(self, other: Self) -> Self:
        """Return the tally of the samples of both."""

    def sums(self) -> list[float]:
        """Return the sums as plain numbers, which ranks can add; `with_sums` is the inverse."""

    def with_sums(self, sums: Sequence[float]) -> Self:
        """Return a tally of the same type with the given sums."""

    def score(self) -> Score:
        """Return the means over the samples; 0 without samples."""


class Task(Protocol):
    """What is learned: losses, tally, metrics and kind of input."""

    @property
    def input(self) -> Literal["images"]:
        """The kind of a sample, which decides how it becomes the model's input."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of a score; the first decides which model is best and when to stop early."""

    def tally(self) -> Tally:
        """Return an empty tally."""

    def training_losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample, from which training computes the gradient."""

    def loss_sum(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the losses as defined for an evaluation."""

    def check_targets(self, batch: Batch, loader: Loader) -> None:
        """Raise DataError for the first sample of `batch` whose target does not fit this task."""
