"""The training step, and where its time goes.

Every rank runs the same steps at the same time: it takes its share of the global batch, computes the gradient of the mean loss over it,
and tells the optimizer how many samples that was; all ranks then use the mean over the samples of all. So N workers do what one would.

The clock splits a rank's time in four: `input` until its share is there, `compute` forward and backward, `wait` for the other ranks'
gradients, `update` of the weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from allstep.data import Batch
from allstep.torch.optimizer import Distributed
from allstep.train.evaluate import Tally, ToInput

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


@dataclass(frozen=True)
class Trainer:
    """What a step works with."""

    net: nn.Module
    optimizer: Distributed
    rate: Callable[[int], float]
    """The learning rate, by samples seen."""
    to_input: ToInput
    accumulation: int = 1


def step(trainer: Trainer, batch: Batch, clock: Clock) -> Tally:
    """One update of the weights from one global batch; the tally of this rank's share of it."""
    clock.lap("input")
    set_rate(trainer.optimizer, trainer.rate(batch.position))
    trainer.optimizer.zero_grad()
    trainer.optimizer.weight = batch.weight
    tally = accumulate_gradients(trainer, batch)
    clock.lap("compute")
    trainer.optimizer.synchronize()
    clock.lap("wait")
    with trainer.optimizer.skip_synchronize():
        trainer.optimizer.step()
    clock.lap("update")
    return tally


def accumulate_gradients(trainer: Trainer, batch: Batch) -> Tally:
    """Adds the gradients of the mean loss over the share, piece by piece; a share without samples adds none."""
    tally = Tally()
    pieces = min(trainer.accumulation, batch.weight) or 1
    for data, target in zip(batch.data.tensor_split(pieces), batch.target.tensor_split(pieces), strict=True):
        if not len(data):
            continue
        pictures = trainer.to_input(data)
        target = target.to(pictures.device)
        logits = trainer.net(pictures)
        loss = functional.cross_entropy(logits, target, reduction="sum")
        (loss / batch.weight).backward()  # type: ignore[no-untyped-call]  # torch's own
        tally.add(loss.detach(), logits.detach(), target)
    return tally


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The same rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
