"""The interface between training and what is learned (D24).

```
model, batch ──┬─> losses    one per sample    ─┐
               ├─> weights   one per sample    ─┴─ gradient of sum of losses / sum of weights
               └─> sums      any shape ── added over batches and ranks ──> metrics
```

A task returns sums, never means: the loop divides once, by the weights of all ranks, so that any
number of workers computes the same, with padding, uneven shares and workers without samples.
Backward pass, optimizer, precision and the exchange of gradients belong to the loop.

A task of your own is a subclass of `Task` with a `model` and `losses`:

```python
class Line(Task):
    def model(self, facts):
        return nn.Linear(facts.shape[0], 1)

    def losses(self, model, batch):
        return (model(batch.data)[:, 0] - batch.target) ** 2
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from allstep.data import Batch, Loader
from allstep.errors import ConfigError
from allstep.train.watch.events import Direction, Figures
from allstep.world import World


class DataFacts(Protocol):
    """What is known about the data when the model is built."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample in training, as the model receives it: channels, height, width of an
        image."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; () if the data has none."""

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 if the data has none."""


Sums = Mapping[str, Tensor]
"""Sums over samples, by name; each of any shape."""


@dataclass(frozen=True)
class Losses:
    """The losses of a batch, with sums that training shows."""

    values: Tensor
    """One loss per sample, (n,), summed over its tokens or pixels."""
    tracked: Sums = field(default_factory=dict)
    """The sums that `Task.tracked` names, from the same forward pass."""


class Examples(Protocol):
    """Collects what is worth looking at during the test, such as wrong predictions."""

    def judge(self, model: nn.Module, batch: Batch, stored: Tensor) -> tuple[Tensor, Sums]:
        """Return what `Task.judge` returns for a batch, and collect from it.

        `stored` are the samples as they were loaded, before they became the model's input.
        """

    def write(self, folder: Path, world: World) -> str | None:
        """Write what all ranks collected to the run folder, on rank 0. A collective.

        Return a message if that fails; else None.
        """


class Task:
    """What is learned. Subclasses define `model` and `losses`, and the rest as needed.

    In all methods `batch` is this rank's share, or a part of it: `batch.data` has the model's
    input, `batch.target` the targets, both on the model's device, n samples.
    """

    input: ClassVar[Literal["images", "arrays"]] = "arrays"
    """What samples are: images are decoded, augmented and normalized; arrays pass unchanged."""
    unit: ClassVar[str] = "samples"
    """What a sample is called on the terminal."""
    objective: ClassVar[tuple[str, Direction]] = ("loss", "min")
    """The figure, loss or a metric, that chooses the best checkpoint and ends runs early; and
    whether less or more is better."""
    percent: ClassVar[tuple[str, ...]] = ()
    """Metrics between 0 and 1 that are shown as percent."""
    tracked: ClassVar[tuple[str, ...]] = ()
    """Names of the sums, single numbers, that `losses` returns in training; `metrics` makes the
    figures of training from them. Empty: training shows the loss only."""

    def model(self, facts: DataFacts) -> nn.Module:
        """Return the model with its initial weights; the random numbers are seeded before."""
        raise NotImplementedError(f"{type(self).__name__} has no method model(facts)")

    def losses(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """Return the loss of each sample, (n,), summed over its tokens or pixels; 0 or more."""
        raise NotImplementedError(f"{type(self).__name__} has no method losses(model, batch)")

    def weights(self, batch: Batch) -> Tensor | None:
        """Return how much each sample counts, (n,), such as its tokens; None: 1 each.

        The loss is divided by the sum of these. A task that overrides this method has one more
        small allreduce in each step.
        """
        return None

    def sums(self, model: nn.Module, batch: Batch) -> Sums:
        """Return sums over the samples of a batch, for `metrics`. Default: none.

        Called in evaluations. Names and shapes must not change from batch to batch.
        """
        return {}

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return metrics from the sums over all samples. Default: none.

        `sums` has those of the method `sums`, in training those that `tracked` names; besides, the
        sum of all "loss", their "weight", and the "count" of samples.
        """
        return {}

    # What the tasks of this package add; a task of your own may leave these as they are.

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the loss of each sample as defined for an evaluation, and the sums."""
        return as_losses(self.losses(model, batch)).values, self.sums(model, batch)

    def check_targets(self, batch: Batch, loader: Loader) -> None:
        """Raise DataError for the first sample of `batch` whose target does not fit this task."""

    def example(self, shape: Sequence[int], count: int) -> tuple[Tensor, Tensor] | None:
        """Return stored samples and targets for timing a step; None: the first ones of the data."""
        return None

    def examples(self) -> Examples | None:
        """Return a collector for the test at the end of a run; None: nothing is collected."""
        return None

    def figures(self) -> Figures:
        """Return how the figures of this task are shown."""
        name, direction = self.objective
        return Figures(name, direction, self.unit, self.percent)

    def has_learned(self, loss: float, metrics: Mapping[str, float], first_loss: float) -> bool:
        """Return whether a few samples count as learned by heart (`--overfit`).

        `loss` and `metrics` are those of the last epoch, `first_loss` that of the first.
        """
        return loss < 0.1 * first_loss

    def loss_of_guessing(self) -> float | None:
        """Return the loss of a model that has learned nothing; None if it is not known."""
        return None


def as_losses(found: Tensor | Losses) -> Losses:
    """Return what `Task.losses` returned as `Losses`."""
    return found if isinstance(found, Losses) else Losses(found)


def check_losses(task: Task, losses: Tensor, count: int) -> None:
    """Raise ConfigError unless the task has returned one loss for each of `count` samples."""
    if losses.shape != (count,):
        raise ConfigError(
            f"task {type(task).__name__}: losses has shape {tuple(losses.shape)} for {count}"
            f" samples, expected ({count},): return one loss per sample, summed over its tokens or"
            " pixels"
        )


def has_weights(task: Task) -> bool:
    """Return whether samples of the task may count differently."""
    return type(task).weights is not Task.weights


def sum_of_weights(task: Task, batch: Batch) -> float:
    """Return the sum of the weights of a batch; their number if all are 1."""
    if not batch.weight:
        # A share without samples may have targets of no shape that the task knows.
        return 0.0
    weights = task.weights(batch)
    return float(batch.weight) if weights is None else float(weights.sum(dtype=torch.float64))
