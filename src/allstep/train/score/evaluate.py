"""Evaluation: every sample counts once, over all ranks, however many there are.

```
rank 0   its share   sums (loss, correct, top5, count) ──┐
rank 1   its share   sums                               ─┼─ added over the ranks, and only then divided: Score
rank 2   no samples  zeros                              ─┘
```

No sample is padded or repeated. One rank that must leave stops all: what was counted so far is no
score. Dropout and norms are in evaluation mode meanwhile, each part of the model then goes back to
the mode it was in. What is wrong with the data on one rank ends all of them alike.
"""

from collections.abc import Callable, Iterator
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
    """Somebody had to leave before all samples were counted; raised on all ranks."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    to_input: ToInput,
    task: Task,
    *,
    mirror: bool = False,
    mistakes: Mistakes | None = None,
    must_leave: Callable[[], bool] = lambda: False,
) -> Score:
    """Return the model's score on all samples of `loader`, the shares of all ranks together.

    mirror: an image's logits are the mean of its own and its mirror image's. mistakes: collects
    what this rank's share got wrong. must_leave: asked before each batch; when it is true on any
    rank, all end with `Interrupted`, the others after their share.
    """

    def count_share() -> tuple[Tally, bool]:
        tally = task.tally()
        for batch in loader.batches():
            if must_leave():
                return tally, True
            if batch.weight:
                _count(
                    task,
                    batch,
                    outputs(model, to_input(batch.data), mirror),
                    loader,
                    tally,
                    mistakes,
                )
        return tally, False

    with evaluating(model):
        mine, is_cut = agree.everyone(comm.init(), count_share)
    sums = torch.tensor([*mine.sums(), is_cut], dtype=torch.float64)
    dist.all_reduce(sums)
    *total, num_cut = sums.tolist()
    if num_cut:
        raise Interrupted
    return mine.with_sums(total).score()


def outputs(model: nn.Module, images: torch.Tensor, mirror: bool = False) -> torch.Tensor:
    """The model's logits, in float32 or better."""
    logits: torch.Tensor = model(images)
    if mirror:
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
    """The model in evaluation mode; each of its parts then goes back to the mode it was in (one may
    be frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
