"""The training step, and where its time goes.

Every rank runs the same steps at the same time: it takes its share of the global batch and computes
the gradient of

    (sum of the losses of its share) x ranks / (samples of the global batch)

The mean of that over the ranks is the gradient of the mean loss over the global batch, however
uneven the shares are: N workers do what one would. The factor is the same on all ranks, because a
synchronised norm carries gradients from one rank's loss to another's samples.

The clock splits a rank's time in four: `input` until its share is there, `compute` forward and
backward, `wait` for the other ranks' gradients (and for what they tell each other after the step),
`update` of the weights and all else but evaluation.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from allstep.data import Batch
from allstep.norm import GhostBatchNorm, SyncBatchNorm
from allstep.optim import add_noise, seed_step, squared_norm
from allstep.parallel.replicated import ReplicatedOptimizer
from allstep.train.precision.precision import Precision, exact
from allstep.train.score.evaluate import ToInput
from allstep.train.task.task import Tally, Task

PHASES = ("input", "compute", "wait", "update")


class Clock:
    """Sums the seconds of each phase. `lap` ends one; the next begins at once."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """All sums to zero, from now on."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """What has passed since the last lap belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def skip(self) -> None:
        """What has passed since the last lap belongs to none: an evaluation."""
        self.last = time.perf_counter()


class GradientSize(NamedTuple):
    """The squared norm of the mean gradient over so many samples."""

    squared: float
    samples: int


@dataclass(kw_only=True)
class Trainer:
    """What a step works with."""

    model: nn.Module
    task: Task
    optimizer: ReplicatedOptimizer
    lr: Callable[[int], float]
    """The learning rate, by samples seen."""
    to_input: ToInput
    precision: Precision
    num_micro_batches: int = 1
    """In which a worker computes its share, one after the other."""
    clip: float | None = None
    """The largest norm of a gradient."""
    noise: Callable[[int], float] | None = None
    """Variance of the noise on gradients, by samples seen."""
    weigh: Callable[[Batch, int], Tensor] | None = None
    """Random weights for the samples of a share of a global batch of so many."""
    seed: int = 0
    rank: int = 0
    size: int = 1
    scale: float = 1.0
    """What the gradients of the last step were multiplied with."""
    first_micro_batch: GradientSize | None = None
    """Of the last step, where `watches_first_piece` asks for it: one worker learns from it how
    noisy its gradients are."""
    measures_first_micro_batch: bool = False
    not_finite: list[int] = field(default_factory=list)
    """Rows of the last share whose loss is not a number, or without bounds."""

    @cached_property
    def ranks_meet(self) -> bool:
        """Whether ranks talk to each other within the model, so that all must go through it equally
        often."""
        return any(_asks_others(layer) for layer in self.model.modules())


def _asks_others(layer: nn.Module) -> bool:
    """Whether a norm takes the samples of other ranks into its statistics."""
    if isinstance(layer, GhostBatchNorm):
        return layer.across_workers
    return isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)


def step(trainer: Trainer, batch: Batch, num_samples: int, clock: Clock) -> Tally:
    """One update of the weights from a global batch of `num_samples`, of which `batch` is this
    rank's share; the tally of the share."""
    clock.lap("input")
    optimizer = trainer.optimizer
    set_lr(optimizer, trainer.lr(batch.position))
    seed_step(trainer.seed, batch.position, trainer.rank)  # dropout's numbers, in a resumed run too
    optimizer.zero_grad()
    optimizer.clip_norm = trainer.clip and trainer.clip * trainer.precision.scale
    trainer.scale, trainer.first_micro_batch = trainer.precision.scale, None
    tally = accumulate_gradients(trainer, batch, num_samples)
    clock.lap("compute")
    optimizer.reduce_gradients()
    clock.lap("wait")
    if finish_gradients(trainer, batch.position):
        optimizer.apply()
    else:
        optimizer.discard()
    clock.lap("update")
    return tally


def accumulate_gradients(trainer: Trainer, batch: Batch, num_samples: int) -> Tally:
    """Adds the gradients of the share's loss, piece by piece; a share without samples adds none.

    Where ranks meet within the model (synchronised norms), all go through it equally often: with
    nothing, if they have nothing.
    """
    tally, factor = trainer.task.tally(), trainer.precision.scale * trainer.size / num_samples
    trainer.not_finite = []
    weights = (
        trainer.weigh(batch, num_samples) if trainer.weigh is not None else batch.data.new_ones(0)
    )
    num_micro_batches = min(
        trainer.num_micro_batches, math.ceil(num_samples / trainer.size)
    )  # the largest share's: the same on all ranks
    for data, target, weight in zip(
        *(each.tensor_split(num_micro_batches) for each in (batch.data, batch.target, weights)),
        strict=True,
    ):
        if not len(data) and not trainer.ranks_meet:
            continue
        images = trainer.to_input(data)
        target = target.to(images.device)
        with trainer.precision.autocast():
            logits = trainer.model(images)
        logits = exact(logits)
        losses = trainer.task.training_losses(logits, target)
        weighed = losses if trainer.weigh is None else losses * weight.to(losses.device)
        (weighed.sum() * factor).backward()
        row = int(tally.count)
        tally.add(losses.detach().sum(), logits.detach(), target)
        if not math.isfinite(tally.loss):
            trainer.not_finite += [
                row + each
                for each in losses.detach().isfinite().logical_not().nonzero().flatten().tolist()
            ]
        if trainer.measures_first_micro_batch and tally.count == len(target) < batch.weight:
            trainer.first_micro_batch = _size_of_gradient(trainer, len(target), factor)
    return tally


def _size_of_gradient(trainer: Trainer, count: int, factor: float) -> GradientSize:
    """What is there after the first piece, as the mean over its samples."""
    gradients = [
        parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None
    ]
    return GradientSize(squared_norm(gradients) / (factor * count) ** 2, count)


def finish_gradients(trainer: Trainer, seen: int) -> bool:
    """Takes float16's scale off the reduced gradients and adds the noise that was asked for; False:
    leave this step out."""
    if trainer.precision.name != "float16" and trainer.noise is None:
        return True
    parameters = [
        parameter for group in trainer.optimizer.param_groups for parameter in group["params"]
    ]
    if not trainer.precision.unscale([each.grad for each in parameters if each.grad is not None]):
        return False
    if trainer.noise is not None:
        add_noise(parameters, trainer.noise(seen), trainer.seed, seen)
    return True


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate for all parameters; a group that has a `rate_factor` gets so many times it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate_factor", 1.0)
