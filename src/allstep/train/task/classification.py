"""Classification of images: a sample has one class, or fractions of several after mixing."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from allstep.data import Batch, Loader
from allstep.errors import DataError
from allstep.models.by_name import make_model
from allstep.models.norms import make_norm
from allstep.train.config.run_config import ModelConfig
from allstep.train.precision.precision import exact
from allstep.train.task.mistakes import Mistakes
from allstep.train.task.task import DataFacts, Losses, Sums, Task
from allstep.train.watch.events import Direction, Figures
from allstep.world import World

_TOP5_FROM = 11
"""Number of classes from which top-5 is shown: with fewer it is high by chance."""
_LEARNED = 0.1
"""Mean loss below which samples count as learned: the right class has 90% then."""


@dataclass(frozen=True)
class Classification(Task):
    """The task of predicting the class of an image.

    `classes` are the names of the classes. `label_smoothing` is the fraction of a target that is
    spread over all classes in training. `section` names the model.
    """

    num_classes: int
    label_smoothing: float = 0.0
    classes: Sequence[str] = field(default=(), compare=False)
    section: ModelConfig = field(default=ModelConfig(), compare=False)

    input: ClassVar[Literal["images", "arrays"]] = "images"
    unit: ClassVar[str] = "images"
    objective: ClassVar[tuple[str, Direction]] = ("accuracy", "max")
    percent: ClassVar[tuple[str, ...]] = ("accuracy", "top5")
    tracked: ClassVar[tuple[str, ...]] = ("correct", "top5")

    def model(self, facts: DataFacts) -> nn.Module:
        """Return the model that the config names."""
        section = self.section
        channels, height, width = facts.shape
        # Norms over several workers or over ghost batches are made from plain ones.
        kind = "batch" if section.norm in ("sync", "ghost") else section.norm
        return make_model(
            section.name,
            num_classes=self.num_classes,
            shape=(channels, height, width),
            norm=make_norm(kind, momentum=section.norm_momentum, scale=section.norm_scale),
            options=dict(section.options),
        )

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Return the cross-entropy of each sample, with smoothed labels, and its sums."""
        logits = exact(model(batch.data))
        values = functional.cross_entropy(
            logits, batch.target, reduction="none", label_smoothing=self.label_smoothing
        )
        return Losses(values, hits(logits.detach(), batch.target))

    def sums(self, model: nn.Module, batch: Batch) -> Sums:
        """Return the number of samples with the right class, and with it among the first five."""
        return hits(exact(model(batch.data)), batch.target)

    def judge(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the cross-entropies without label smoothing, and the sums."""
        return _judged(exact(model(batch.data)), batch.target)

    def metrics(self, sums: Sums) -> Mapping[str, float]:
        """Return the accuracy, and that of the five most probable classes."""
        count = sums["count"]
        return {"accuracy": float(sums["correct"] / count), "top5": float(sums["top5"] / count)}

    def figures(self) -> Figures:
        """Return how accuracy and top-5 are shown."""
        hidden = () if self.num_classes >= _TOP5_FROM else ("top5",)
        return replace(super().figures(), hidden=hidden, labels={"top5": "top-5"})

    def example(self, shape: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Return random images of one class."""
        # A generator of its own, so that the random numbers of the run do not change.
        draws = torch.Generator().manual_seed(0)
        images = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=draws)
        return images, torch.zeros(count, dtype=torch.int64)

    def examples(self) -> "WrongPredictions":
        """Return a collector of wrong predictions."""
        return WrongPredictions(Mistakes(self.classes))

    def has_learned(self, loss: float, metrics: Mapping[str, float], first_loss: float) -> bool:
        """Return whether all samples are right, with confidence."""
        return metrics.get("accuracy") == 1.0 and loss < _LEARNED

    def loss_of_guessing(self) -> float:
        """Return the cross-entropy of equal probabilities."""
        return math.log(max(2, self.num_classes))

    def check_targets(self, batch: Batch, loader: Loader) -> None:
        """Raise DataError for the first sample of `batch` whose class the model does not have."""
        target = batch.target
        if target.ndim > 1 and target.shape[1] != self.num_classes:
            what = f"its target has {target.shape[1]} classes, the model has {self.num_classes}"
            raise _wrong(batch, 0, loader, what)
        if target.ndim > 1 or not len(target):
            return
        least, most = target.aminmax()
        if int(least) >= 0 and int(most) < self.num_classes:
            return
        is_wrong = (target < 0) | (target >= self.num_classes)
        row = int(is_wrong.nonzero()[0])
        label, last = int(target[row]), self.num_classes - 1
        what = f"its label is {label}, the model's classes are 0 to {last}"
        raise _wrong(batch, row, loader, what)


@dataclass(frozen=True)
class WrongPredictions:
    """Collects the mistakes of a test."""

    mistakes: Mistakes

    def judge(self, model: nn.Module, batch: Batch, stored: Tensor) -> tuple[Tensor, Sums]:
        """Return the losses and sums of a batch, and collect its wrong predictions."""
        logits = exact(model(batch.data))
        self.mistakes.add(stored, batch.samples, logits, as_classes(batch.target))
        return _judged(logits, batch.target)

    def write(self, folder: Path, world: World) -> str | None:
        """Write confusion matrix and worst mistakes to the run folder. A collective."""
        return self.mistakes.write(folder, world)


def hits(logits: Tensor, target: Tensor) -> Sums:
    """Return how many samples have the right class, and how many have it among the first five.

    `target` has classes, or fractions of classes (n, classes), of which the largest counts.
    """
    classes = as_classes(target)
    five = logits.topk(min(5, logits.shape[1]), sorted=False).indices
    return {
        "correct": (logits.argmax(1) == classes).sum(),
        "top5": (five == classes[:, None]).sum(),
    }


def as_classes(target: Tensor) -> Tensor:
    """Return the class of each sample; of soft targets (n, classes), that of the largest value."""
    return target if target.ndim == 1 else target.argmax(1)


def _judged(logits: Tensor, target: Tensor) -> tuple[Tensor, Sums]:
    losses = functional.cross_entropy(logits, target, reduction="none")
    return losses, hits(logits, target)


def _wrong(batch: Batch, row: int, loader: Loader, what: str) -> DataError:
    number = int(batch.samples[row])
    place = loader.source.place(number)
    return DataError(
        f"sample {number} ({place}): {what}; correct the labels, or set data.num_classes and"
        " data.labels_from"
    )
