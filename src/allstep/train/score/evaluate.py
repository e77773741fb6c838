"""Evaluation: every sample counts once, over all ranks, however many there are.

```
rank 0   its share   sums (loss, correct, top5, count) ──┐
rank 1   its share   sums                               ─┼─ added over the ranks, and only then divided: Score
rank 2   no samples  zeros                              ─┘
```

No sample is padded or repeated. One rank that must leave stops all: what was counted so far is no score. Dropout and norms are in
evaluation mode meanwhile, each part of the net then goes back to the mode it was in. What is wrong with the data on one rank ends all of
them alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from allstep import comm
from allstep.comm.group import decide as agree
from allstep.data import Batch, Loader
from allstep.errors import DataError
from allstep.train.precision.precision import exact
from allstep.train.score.mistakes import Mistakes
from allstep.train.watch.events import Score

ToInput = Callable[[torch.Tensor], torch.Tensor]


class Interrupted(Exception):
    """Somebody had to leave before all samples were counted; raised on all ranks."""


@dataclass
class Tally:
    """Sums over samples. Adding tallies of disjoint samples gives the tally of them all."""

    loss: float = 0.0
    correct: float = 0.0
    top5: float = 0.0
    """Samples whose class is among the five likeliest, or among all where there are fewer."""
    count: float = 0.0

    def add(self, loss: torch.Tensor, logits: torch.Tensor, target: torch.Tensor) -> None:
        """Counts some samples, given the sum of their losses. `target` holds classes, or (n, classes) shares of which the largest counts.

        The device is waited for once.
        """
        classes = as_classes(target)
        five = logits.topk(min(5, logits.shape[1]), sorted=False).indices
        correct, top5 = (logits.argmax(1) == classes).sum(), (five == classes[:, None]).sum()
        sums = torch.stack((loss.detach().double(), correct.double(), top5.double())).tolist()
        self.loss, self.correct, self.top5 = self.loss + sums[0], self.correct + sums[1], self.top5 + sums[2]
        self.count += len(target)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(mine + theirs for mine, theirs in zip(self.sums(), other.sums(), strict=True)))

    def sums(self) -> list[float]:
        """As plain numbers, to be sent; `Tally(*sums)` is the way back."""
        return [self.loss, self.correct, self.top5, self.count]

    def score(self) -> Score:
        """The means; of no samples they are 0."""
        count = max(1.0, self.count)
        return Score(self.loss / count, self.correct / count, round(self.count), self.top5 / count)


@torch.no_grad()
def evaluate(
    net: nn.Module,
    loader: Loader,
    to_input: ToInput,
    *,
    mirror: bool = False,
    mistakes: Mistakes | None = None,
    must_leave: Callable[[], bool] = lambda: False,
) -> Score:
    """The net's score on all samples of `loader`, the shares of all ranks together.

    mirror: a picture's logits are the mean of its own and its mirror image's. mistakes: collects what this rank's share got wrong.
    must_leave: asked before each batch; when it is true on any rank, all end with `Interrupted`, the others after their share.
    """

    def count_share() -> tuple[Tally, bool]:
        tally = Tally()
        for batch in loader.batches():
            if must_leave():
                return tally, True
            if batch.weight:
                _count(batch, outputs(net, to_input(batch.data), mirror), loader, tally, mistakes)
        return tally, False

    with evaluating(net):
        mine, is_cut = agree.everyone(comm.init(), count_share)
    sums = torch.tensor([*mine.sums(), is_cut], dtype=torch.float64)
    dist.all_reduce(sums)
    *total, num_cut = sums.tolist()
    if num_cut:
        raise Interrupted
    return Tally(*total).score()


def outputs(net: nn.Module, pictures: torch.Tensor, mirror: bool = False) -> torch.Tensor:
    """The net's logits, in float32 or better."""
    logits: torch.Tensor = net(pictures)
    if mirror:
        logits = (logits + net(pictures.flip(-1))) / 2
    return exact(logits)


def as_classes(target: torch.Tensor) -> torch.Tensor:
    """The class of each sample; of soft targets, (n, classes), the one with the largest share."""
    return target if target.ndim == 1 else target.argmax(1)


def check_targets(batch: Batch, num_classes: int, loader: Loader) -> None:
    """A DataError that names the first sample of `batch` whose class is none of the net's."""
    target = batch.target
    if target.ndim > 1 and target.shape[1] != num_classes:
        raise _wrong(batch, 0, loader, f"its target has {target.shape[1]} classes, the net has {num_classes}")
    if target.ndim > 1 or not len(target):
        return
    least, most = target.aminmax()
    if int(least) >= 0 and int(most) < num_classes:
        return
    row, label = next((row, label) for row, label in enumerate(target.tolist()) if not 0 <= label < num_classes)
    raise _wrong(batch, row, loader, f"its label is {label}, the net's classes are 0 to {num_classes - 1}")


def _wrong(batch: Batch, row: int, loader: Loader, what: str) -> DataError:
    number = int(batch.samples[row])
    place = loader.source.place(number)
    return DataError(
        f"sample {number} ({place}): {what}; mend the labels, or set data.num_classes and data.labels_from"
    )


def _count(batch: Batch, logits: torch.Tensor, loader: Loader, tally: Tally, mistakes: Mistakes | None) -> None:
    check_targets(batch, logits.shape[1], loader)
    target = batch.target.to(logits.device)
    tally.add(functional.cross_entropy(logits, target, reduction="sum"), logits, target)
    if mistakes is not None:
        mistakes.add(batch.data, batch.samples, logits, as_classes(target))


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """The net in evaluation mode; each of its parts then goes back to the mode it was in (one may be frozen)."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
