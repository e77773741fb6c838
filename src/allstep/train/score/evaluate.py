"""Evaluation: every sample is counted once, with any number of ranks.

```
rank 0   its share    sums (loss, correct, top5, count) ──┐
rank 1   its share    sums                               ─┼─ added over the ranks, then divided:
rank 2   no samples   zeros                              ─┘  Score
```

No sample is padded or repeated. If one rank must stop early, all ranks stop, since sums over some
samples are not a score. The model is in evaluation mode during the evaluation; afterwards each of
its modules returns to its previous mode. An error in the data of one rank ends all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from allstep import comm
from allstep.comm.group import agree
from allstep.data import Batch, Loader
from allstep.train.precision.precision import exact
from allstep.train.score.mistakes import Mistakes
from allstep.train.task.classification import as_classes
from allstep.train.task.task import Tally, Task
from allstep.train.watch.events import Score

ToInput = Callable[[torch.Tensor], torch.Tensor]


class Interrupted(Exception):
    """A rank had to stop before all samples were counted; raised on all ranks."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    to_input: ToInput,
    task: Task,
    *,
    flip: bool = False,
    mistakes: Mistakes | None = None,
    must_leave: Callable[[], bool] = lambda: False,
) -> Score:
    """Return the model's score on all samples of `loader`, over the shares of all ranks.

    A collective. `to_input` converts stored samples to the model's input. With `flip` the logits of
    an image are the mean of those of the image and of its mirror image. `mistakes` collects the
    wrong predictions of this rank's share. `must_leave` is called before each batch; if it returns
    True on any rank, all ranks raise `Interrupted`, the others after their share.
    """

    def count_share() -> tuple[Tally, bool]:
        tally = task.tally()
        for batch in loader.batches():
            if must_leave():
                return tally, True
            if batch.weight:
                logits = outputs(model, to_input(batch.data), flip)
                _count(task, batch, logits, loader, tally, mistakes)
        return tally, False

    with evaluating(model):
        mine, is_cut = agree.everyone(comm.init(), count_share)
    sums = torch.tensor([*mine.sums(), is_cut], dtype=torch.float64)
    dist.all_reduce(sums)
    *total, num_cut = sums.tolist()
    if num_cut:
        raise Interrupted
    return mine.with_sums(total).score()


@torch.no_grad()
def tally_alone(
    model: nn.Module, batches: Iterable[Batch], to_input: ToInput, task: Task, *, flip: bool = False
) -> Tally:
    """Return the sums over `batches` on this rank alone, with a model in evaluation mode.

    One rank that has all batches of an `evaluate` gets the same bits. The targets are not checked.
    """
    tally = task.tally()
    for batch in batches:
        logits = outputs(model, to_input(batch.data), flip)
        target = batch.target.to(logits.device)
        tally.add(task.loss_sum(logits, target), logits, target)
    return tally


def outputs(model: nn.Module, images: torch.Tensor, flip: bool = False) -> torch.Tensor:
    """Return the model's logits, in at least float32.

    With `flip` they are the means over each image and its mirror image.
    """
    logits: torch.Tensor = model(images)
    if flip:
        logits = (logits + model(images.flip(-1))) / 2
    return exact(logits)


def _count(
    task: Task,
    batch: Batch,
    outputs: torch.Tensor,
    loader: Loader,
    tally: Tally,
    mistakes: Mistakes | None,
) -> None:
    task.check_targets(batch, loader)
    target = batch.target.to(outputs.device)
    tally.add(task.loss_sum(outputs, target), outputs, target)
    if mistakes is not None:
        mistakes.add(batch.data, batch.samples, outputs, as_classes(target))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode within the context.

    Afterwards each of its modules returns to its previous mode: some may be frozen in evaluation
    mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
