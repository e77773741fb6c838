"""Classification of images: a sample has one class, or fractions of several after mixing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from allstep.data import Batch, Loader
from allstep.errors import DataError
from allstep.train.task.task import Metric
from allstep.train.watch.events import Score


@dataclass
class ClassificationTally:
    """Sums over samples: losses, correct predictions, number of samples."""

    loss: float = 0.0
    correct: float = 0.0
    top5: float = 0.0
    """Samples whose class is among the five likeliest, or among all classes if there are fewer."""
    count: float = 0.0

    def add(self, loss: Tensor, outputs: Tensor, target: Tensor) -> None:
        """Add samples, given the sum of their losses.

        `target` has classes, or fractions of classes (n, classes), of which the largest counts.
        Synchronizes with the device once.
        """
        classes = as_classes(target)
        five = outputs.topk(min(5, outputs.shape[1]), sorted=False).indices
        correct, top5 = (outputs.argmax(1) == classes).sum(), (five == classes[:, None]).sum()
        sums = torch.stack((loss.detach().double(), correct.double(), top5.double())).tolist()
        self.loss += sums[0]
        self.correct += sums[1]
        self.top5 += sums[2]
        self.count += len(target)

    def __add__(self, other: "ClassificationTally") -> "ClassificationTally":
        return self.with_sums(
            [mine + theirs for mine, theirs in zip(self.sums(), other.sums(), strict=True)]
        )

    def sums(self) -> list[float]:
        """Return the sums as plain numbers, which ranks can add; `with_sums` is the inverse."""
        return [self.loss, self.correct, self.top5, self.count]

    def with_sums(self, sums: Sequence[float]) -> "ClassificationTally":
        """Return a tally with other sums."""
        return ClassificationTally(*sums)

    def score(self) -> Score:
        """Return the means over the samples; 0 without samples."""
        count = max(1.0, self.count)
        return Score(self.loss / count, self.correct / count, round(self.count), self.top5 / count)


@dataclass(frozen=True)
class Classification:
    """The task of predicting the class of an image.

    `label_smoothing` is the fraction of a target that is spread over all classes in training.
    """

    num_classes: int
    label_smoothing: float = 0.0
    input: Literal["images"] = "images"
    metrics: tuple[Metric, ...] = (
        Metric("accuracy", True),
        Metric("top5", True),
        Metric("loss", False),
    )

    def tally(self) -> ClassificationTally:
        """Return an empty tally."""
        return ClassificationTally()

    def training_losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the cross-entropy of each sample, with smoothed labels."""
        return functional.cross_entropy(
            outputs, target, reduction="none", label_smoothing=self.label_smoothing
        )

    def loss_sum(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the sum of the samples' cross-entropies, without label smoothing."""
        return functional.cross_entropy(outputs, target, reduction="sum")

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


def as_classes(target: Tensor) -> Tensor:
    """Return the class of each sample; of soft targets (n, classes), that of the largest value."""
    return target if target.ndim == 1 else target.argmax(1)


def _wrong(batch: Batch, row: int, loader: Loader, what: str) -> DataError:
    number = int(batch.samples[row])
    place = loader.source.place(number)
    return DataError(
        f"sample {number} ({place}): {what}; correct the labels, or set data.num_classes and"
        " data.labels_from"
    )
