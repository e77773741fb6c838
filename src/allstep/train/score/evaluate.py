"""Evaluation: every sample is counted once, with any number of ranks.

```
rank 0   its share    sums (loss, weight, count, those of the task) ──┐
rank 1   its share    sums                                           ─┼─ added over the ranks,
rank 2   no samples   zeros                                          ─┘  then divided: Score
```

No sample is padded or repeated. If one rank must stop early, all ranks stop, since sums over some
samples are not a score. The model is in evaluation mode during the evaluation; afterwards each of
its modules returns to its previous mode. An error in the data of one rank ends all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from allstep import comm
from allstep.comm.group import agree
from allstep.data import Batch, Loader
from allstep.train.precision.precision import exact
from allstep.train.task.tally import Tally
from allstep.train.task.task import Examples, Task, check_losses, has_weights, sum_of_weights
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
    examples: Examples | None = None,
    must_leave: Callable[[], bool] = lambda: False,
) -> Score:
    """Return the model's score on all samples of `loader`, over the shares of all ranks.

    A collective. `to_input` converts stored samples to the model's input. With `flip` the output
    for an image is the mean of those for the image and for its mirror image. `examples` collects
    from this rank's share. `must_leave` is called before each batch; if it returns True on any
    rank, all ranks raise `Interrupted`, the others after their share.
    """
    world, used = comm.init(), WithMirror(model) if flip else model

    def count_share() -> tuple[Tally, bool]:
        tally = Tally(task)
        for batch in loader.batches():
            if must_leave():
                return tally, True
            if batch.weight:
                task.check_targets(batch, loader)
                _count(task, used, batch, to_input(batch.data), tally, examples)
        return tally, False

    with evaluating(used):
        mine, is_cut = agree.everyone(world, count_share)
    layouts = agree.gather(world, mine.layout)
    mine = mine.with_layout(layouts)
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
    tally, used = Tally(task), WithMirror(model) if flip else model
    for batch in batches:
        _count(task, used, batch, to_input(batch.data), tally, None)
    return tally


def _count(
    task: Task,
    model: nn.Module,
    batch: Batch,
    data: torch.Tensor,
    tally: Tally,
    examples: Examples | None,
) -> None:
    """Add a batch, of which `data` is the model's input, to the tally."""
    ready = replace(batch, data=data, target=batch.target.to(data.device))
    if examples is None:
        losses, sums = task.judge(model, ready)
    else:
        losses, sums = examples.judge(model, ready, batch.data)
    check_losses(task, losses, batch.weight)
    weight = sum_of_weights(task, ready) if has_weights(task) else None
    tally.add(losses.sum(dtype=torch.float64), sums, batch.weight, weight)


class WithMirror(nn.Module):
    """A model whose output for images is the mean of those for them and for their mirror images.

    Outputs are in at least float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the mean of both outputs."""
        return exact((self.model(images) + self.model(images.flip(-1))) / 2)


def outputs(model: nn.Module, images: torch.Tensor, flip: bool = False) -> torch.Tensor:
    """Return the model's logits, in at least float32; with `flip` those of `WithMirror`."""
    logits: torch.Tensor = (WithMirror(model) if flip else model)(images)
    return exact(logits)


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
