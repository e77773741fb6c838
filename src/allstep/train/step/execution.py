"""How the model is run: plain, channels-last or compiled. Which is fastest depends on model, batch and
machine, so it is tried out.

```
plain           weights as torch makes them
channels-last   the channels of a pixel lie side by side, as the convolutions of CPUs and of newer GPUs like it
compiled        channels-last, and torch.compile makes one program of the model; that takes its time, and a C++ compiler on a CPU
```

`choose` runs a few training steps each way, on a copy, so that the model's statistics and the random
numbers of the run are as if nothing had been. The ranks add up their times and take the same way.
Compiling must pay for itself in the steps that the run has left; it counts three times, because
evaluation and the uneven last batch of an epoch are compiled too. A way that fails is left out, and
a note says why in one line. `timing` does the timing.

`settle` is for a way that the user has fixed: one step of two samples (to compile: of all) shows
whether the model can be run that way; if not, it falls back along compiled -> channels-last -> plain.
A model that flattens with `view` instead of `flatten`, say, cannot be channels-last.

`applied` puts a model into a way, in place. Names of weights stay, so checkpoints do not know about
it. Another way adds numbers in another order: a run that was resumed to the same bits must take the
way that its first part had, not choose again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allstep.norm import SyncBatchNorm
from allstep.train.step.timing import (
    Example,
    LossOf,
    Trial,
    TrialModel,
    fastest,
    figures,
    stage,
    together,
)
from allstep.world import World

PLAIN, CHANNELS_LAST, COMPILED = WAYS = ("plain", "channels-last", "compiled")


@dataclass(frozen=True)
class Chosen:
    """The way that was taken, and why."""

    name: str
    model: nn.Module
    """The model that was given, in that way."""
    seconds: Mapping[str, float]
    """Of a step, forward and backward, by way: the mean over the ranks of their medians."""
    notes: tuple[str, ...]
    """A line on the times, and one on each way that was left out."""


def choose(
    model: nn.Module,
    example: Example,
    loss_of: LossOf,
    world: World,
    ways: Sequence[str] = WAYS,
    steps: int = 5,
    remaining_steps: float = math.inf,
) -> Chosen:
    """The fastest of `ways` for this model, applied to it. A collective: all ranks choose together.

    example: input and target of a rank's share of a batch. loss_of(model, input, target): the loss,
    as the training step computes it.
    """
    with stage(model, example) as copied:
        mine = {way: _trial(copied, way, loss_of, steps) for way in ways}
    if copied.first_error is not None and not any(trial.works for trial in mine.values()):
        raise copied.first_error  # not a matter of the way
    trials = together(world, mine)
    name = decide(trials, remaining_steps)
    notes = [_times(trials, name, remaining_steps), *_complaints(trials)]
    seconds = {way: trial.seconds for way, trial in trials.items() if trial.works}
    return Chosen(name, applied(model, name), seconds, tuple(notes))


def settle(model: nn.Module, example: Example, loss_of: LossOf, world: World, name: str) -> Chosen:
    """The way `name`, applied to the model, or the nearest one in which it can be run.

    A collective like `choose`.
    """
    complaints: list[str] = []
    for way in reversed(WAYS[1 : WAYS.index(name) + 1]):
        few = example if way == COMPILED else (example[0][:2], example[1][:2])
        with stage(model, few) as copied:
            trials = together(world, {way: _trial(copied, way, loss_of, 0)})
        if trials[way].works:
            return Chosen(way, applied(model, way), {}, tuple(complaints))
        complaints += _complaints(trials)
    return Chosen(PLAIN, applied(model, PLAIN), {}, tuple(complaints))


def decide(trials: Mapping[str, Trial], remaining_steps: float) -> str:
    """The way with the fewest seconds for the steps that are left, compiling included."""
    return fastest(trials, remaining_steps) or PLAIN


def applied(model: nn.Module, name: str) -> nn.Module:
    """The same model, in that way from now on."""
    if name not in WAYS:
        raise ValueError(f"execution {name!r} is not one of {', '.join(WAYS)}")
    memory_format = torch.contiguous_format if name == PLAIN else torch.channels_last
    for tensor in [*model.parameters(), *model.buffers()]:
        if (
            tensor.dim() == 4
        ):  # torch's own Module.to() refuses models that have 5-dimensional ones as well
            tensor.data = _laid_out(tensor.data, memory_format)
    model._compiled_call_impl = _compiled(model) if name == COMPILED else None
    return model


def _laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """With the strides of that format in any case: a tensor of one channel counts as laid out
    either way, and torch looks at its strides to choose its kernels (a grey image's first
    convolution made a small model 1.6 times as slow)."""
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format
    ).copy_(tensor)


def _compiled(model: nn.Module) -> Any:
    """As Module.compile() does it; but that silently compiles nothing of models that are one of
    torch's own classes, like Sequential."""

    def call(*args: Any, **named: Any) -> Any:
        return model._call_impl(*args, **named)  # type: ignore[no-untyped-call]  # torch's own

    return torch.compile(call)


def _trial(copied: TrialModel, way: str, loss_of: LossOf, steps: int) -> Trial:
    compiles = way == COMPILED
    if compiles and any(isinstance(layer, SyncBatchNorm) for layer in copied.model.modules()):
        return Trial(why_not="its norms talk to the other ranks, which cannot be compiled")
    return copied.trial(loss_of, steps, lambda model: applied(model, way), compiles)


def _complaints(trials: Mapping[str, Trial]) -> list[str]:
    return [
        f"execution {way} was left out: {trial.why_not}"
        for way, trial in trials.items()
        if not trial.works
    ]


def _times(trials: Mapping[str, Trial], name: str, remaining_steps: float) -> str:
    """The figures behind the choice."""
    left = f"; {remaining_steps:.0f} steps are left" if math.isfinite(remaining_steps) else ""
    return f"execution {name}: a step takes {figures(trials)}{left}"
