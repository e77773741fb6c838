"""The training step, and the time of its phases.

All ranks run the same steps at the same time. In each step a rank takes its share of the global
batch and computes the gradient of

    (sum of the losses of its share) x ranks / (sum of the weights of the global batch)

where a sample weighs 1 unless the task returns weights, which the ranks then add first. The mean of
this gradient over the ranks is the gradient of the mean loss over the global batch, for shares of
any size: N workers compute what one worker would. The factor is the same on all ranks, because a
synchronized norm carries gradients from one rank's loss to another rank's samples.

A step commits in one place (D15). All its collectives come before its first lasting change:

    reduce_step       forward, backward, reduction of the gradients
    after_step        the small sum over the ranks: tally, stop request, running statistics
    update_weights    the commit: update, EMA, position; local, so that it cannot fail

A step that fails because a rank is lost leaves weights, optimizer and run state as they were. With
shared weights the update ends with a meeting of the host's ranks, which can fail; then an undo copy
of weights and optimizer is restored (`parallel.updates.undo`).

`Clock` divides the time of a rank into four phases:

    input      until the share of the batch is available
    compute    forward and backward
    wait       for the gradients of other ranks, and for the exchange after the step
    update     of the weights, and everything else except evaluation
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from allstep import faults
from allstep.data import Batch
from allstep.data.order import Weights, even, lengths
from allstep.norm import GhostBatchNorm, SyncBatchNorm
from allstep.optim import add_noise, seed_step, squared_norm
from allstep.parallel.injected import flip_bit
from allstep.parallel.replicated import ReplicatedOptimizer
from allstep.train.precision.precision import Precision, exact
from allstep.train.score.evaluate import ToInput
from allstep.train.step.split_batch import split
from allstep.train.task.tally import Tally
from allstep.train.task.task import Task, as_losses, check_losses, has_weights, sum_of_weights

PHASES = ("input", "compute", "wait", "update")


class Clock:
    """Seconds spent in each phase. `lap` ends a phase and starts the next one."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Set all sums to zero and start the next phase now."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    @property
    def per_sample(self) -> float:
        """Seconds in the phases that grow with the samples of a share: input and compute."""
        return self.seconds["input"] + self.seconds["compute"]

    def skip(self) -> None:
        """Drop the time since the last lap, which belongs to no phase (an evaluation)."""
        self.last = time.perf_counter()


class GradientSize(NamedTuple):
    """The squared norm of the mean gradient over `samples` samples."""

    squared: float
    samples: int


@dataclass(kw_only=True)
class Trainer:
    """The objects and settings that a step uses, and what it leaves for its caller."""

    model: nn.Module
    task: Task
    optimizer: ReplicatedOptimizer
    lr: Callable[[int], float]
    """Returns the learning rate for a number of samples seen."""
    to_input: ToInput
    precision: Precision
    num_micro_batches: int = 1
    """Number of micro-batches in which a worker computes its share, one after the other."""
    clip: float | None = None
    """Largest norm of the gradient; a larger gradient is scaled down to it."""
    noise: Callable[[int], float] | None = None
    """Returns the variance of the gradient noise for a number of samples seen."""
    weigh: Callable[[Batch, int], Tensor] | None = None
    """Returns random weights for the samples of a share; called with the size of the global batch.
    """
    seed: int = 0
    rank: int = 0
    size: int = 1
    shares: Weights = ()
    """Weights of the workers' shares of a global batch; empty: even ones."""
    scale: float = 1.0
    """Factor by which the gradients of the last step were multiplied."""
    first_micro_batch: GradientSize | None = None
    """Gradient of the first micro-batch of the last step, if `measures_first_micro_batch` is set.

    A single worker estimates its noise scale from it.
    """
    measures_first_micro_batch: bool = False
    not_finite: list[int] = field(default_factory=list)
    """Rows of the last share whose loss is NaN or infinite."""

    @cached_property
    def layers_communicate(self) -> bool:
        """Whether layers of the model communicate, so that all ranks must call it equally often."""
        return any(communicates(layer) for layer in self.model.modules())


def communicates(layer: nn.Module) -> bool:
    """Return whether a norm includes the samples of other ranks in its statistics."""
    if isinstance(layer, GhostBatchNorm):
        return layer.across_workers
    return isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)


def step(trainer: Trainer, batch: Batch, num_samples: int, clock: Clock) -> Tally:
    """Update the weights from a global batch of `num_samples`. Return the tally of this rank.

    `batch` is this rank's share of the global batch. `clock` receives the time of the phases.
    """
    tally = reduce_step(trainer, batch, num_samples, clock)
    update_weights(trainer, batch.position, clock)
    return tally


def reduce_step(trainer: Trainer, batch: Batch, num_samples: int, clock: Clock) -> Tally:
    """Do the first half of `step`: the reduced gradients are complete, the weights unchanged.

    Only buffers that the forward pass changes differ from before (`RunningStatistics.restore`).
    """
    clock.lap("input")
    if faults.active is not None and faults.active.takes("flip"):
        flip_bit(trainer.model.parameters())
    optimizer = trainer.optimizer
    # Dropout draws the same numbers in a resumed run.
    seed_step(trainer.seed, batch.position, trainer.rank)
    optimizer.zero_grad()
    optimizer.clip_norm = trainer.clip and trainer.clip * trainer.precision.scale
    trainer.scale, trainer.first_micro_batch = trainer.precision.scale, None
    tally = accumulate_gradients(trainer, batch, num_samples, clock)
    if faults.active is not None:
        faults.active.reduce_begins()
    clock.lap("compute")
    optimizer.reduce_gradients()
    clock.lap("wait")
    return tally


def update_weights(trainer: Trainer, position: int, clock: Clock) -> None:
    """Do the second half of `step`, which depends on no other rank.

    `position` is that of the batch.
    """
    optimizer = trainer.optimizer
    if faults.active is not None:
        faults.active.update_begins()
    set_lr(optimizer, trainer.lr(position))
    if finish_gradients(trainer, position):
        optimizer.apply()
    else:
        optimizer.discard()
    if faults.active is not None:
        faults.active.step_ends()
    clock.lap("update")


def accumulate_gradients(
    trainer: Trainer, batch: Batch, num_samples: int, clock: Clock | None = None
) -> Tally:
    """Add the gradients of the share's loss, one micro-batch after the other. Return the tally.

    A share without samples adds no gradients. If layers communicate (synchronized norms), all ranks
    call the model equally often, with empty micro-batches where a rank has no samples.
    """
    tally = Tally.of_training(trainer.task)
    trainer.not_finite = []
    # From the largest share, so that the number is the same on all ranks.
    largest = max(lengths(num_samples, trainer.shares or even(trainer.size)))
    count = min(trainer.num_micro_batches, largest)
    micro_batches: Iterable[Batch] = (_as_input(trainer, each) for each in split(batch, count))
    total = float(num_samples)
    if has_weights(trainer.task):
        micro_batches = list(micro_batches)
        mine = sum(sum_of_weights(trainer.task, each) for each in micro_batches)
        total = _sum_over_ranks(trainer, mine, clock or Clock())
    factor = trainer.precision.scale * trainer.size / total if total else 0.0
    random_weights = (
        trainer.weigh(batch, num_samples) if trainer.weigh is not None else batch.data.new_ones(0)
    ).tensor_split(count)
    for each, weights in zip(micro_batches, random_weights, strict=True):
        if not each.weight and not trainer.layers_communicate:
            continue
        _backward(trainer, each, weights, factor, tally)
        if trainer.measures_first_micro_batch and tally.count == each.weight < batch.weight:
            trainer.first_micro_batch = _size_of_gradient(trainer, each.weight, factor)
    return tally


def _as_input(trainer: Trainer, batch: Batch) -> Batch:
    """Return the batch with the model's input in place of stored samples, on the model's device."""
    data = trainer.to_input(batch.data)
    return replace(batch, data=data, target=batch.target.to(data.device))


def _sum_over_ranks(trainer: Trainer, mine: float, clock: Clock) -> float:
    """Return the sum of a number over the ranks; the time until all have it counts as waiting."""
    if trainer.size == 1:
        return mine
    clock.lap("compute")
    total = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(total)
    clock.lap("wait")
    return float(total)


def _backward(trainer: Trainer, batch: Batch, weights: Tensor, factor: float, tally: Tally) -> None:
    """Add the gradients of one micro-batch, and add it to the tally."""
    task = trainer.task
    with trainer.precision.autocast():
        found = as_losses(task.losses(trainer.model, batch))
    losses = exact(found.values)
    check_losses(task, losses, batch.weight)
    if faults.active is not None and faults.active.has("nan"):
        losses = losses * math.nan
    weighed = losses if trainer.weigh is None else losses * weights.to(losses.device)
    # torch does not annotate `backward`.
    (weighed.sum() * factor).backward()  # type: ignore[no-untyped-call]
    row = int(tally.count)
    weight = sum_of_weights(task, batch) if has_weights(task) else None
    tally.add(losses.detach().sum(), found.tracked, batch.weight, weight)
    if not math.isfinite(tally.loss):
        wrong = losses.detach().isfinite().logical_not().nonzero().flatten()
        trainer.not_finite += [row + each for each in wrong.tolist()]


def _size_of_gradient(trainer: Trainer, count: int, factor: float) -> GradientSize:
    """Return the size of the gradient after the first micro-batch, as the mean of its samples."""
    gradients = [
        parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None
    ]
    return GradientSize(squared_norm(gradients) / (factor * count) ** 2, count)


def finish_gradients(trainer: Trainer, seen: int) -> bool:
    """Divide the reduced gradients by float16's loss scale and add noise, where configured.

    Return False if a gradient overflowed, so that this step must be skipped.
    """
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
    """Set the learning rate of each group: `lr`, times the group's `rate_factor` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate_factor", 1.0)
