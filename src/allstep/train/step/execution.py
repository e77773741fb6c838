"""The execution mode of the model: plain, channels-last or compiled.

Which mode is fastest depends on model, batch and machine, so it can be measured.

```
plain           memory format as torch creates the weights
channels-last   the channels of a pixel are adjacent in memory; faster for convolutions on CPUs and
                newer GPUs
compiled        channels-last, and torch.compile; compiling takes time, and on a CPU it needs a C++
                compiler
```

`choose` measures a few training steps in each mode on a copy of the model, so that the model's
statistics and the random numbers of the run do not change. The ranks average their times and all
choose the same mode. The time saved in the remaining steps of the run must exceed the cost of
compiling. That cost counts three times, because evaluation and the uneven last batch of an epoch
are compiled too. A mode that fails is excluded, and a note gives the reason in one line. Module
`timing` measures the times.

`settle` applies a mode that the user has fixed. One step of two samples (in compiled mode: of all
samples) shows whether the model works in that mode; if not, it falls back along compiled ->
channels-last -> plain. For example, a model that flattens with `view` instead of `flatten` does not
work in channels-last.

`applied` switches a model to a mode, in place. The names of weights do not change, so checkpoints
do not depend on the mode. Modes add numbers in different orders: a resumed run must use the mode it
started with, not choose again, to compute the same bits.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allstep.data import Batch
from allstep.data.cache import cache_folder
from allstep.errors import ConfigError
from allstep.files.home import private_folder
from allstep.norm import SyncBatchNorm
from allstep.train.step.timing import (
    LossOf,
    Trial,
    TrialModel,
    fastest,
    figures,
    stage,
    together,
)
from allstep.world import World

PLAIN, CHANNELS_LAST, COMPILED = MODES = ("plain", "channels-last", "compiled")


@dataclass(frozen=True)
class Chosen:
    """The execution mode that was chosen, with the measurements behind the choice."""

    name: str
    model: nn.Module
    """The given model, switched to that mode."""
    seconds: Mapping[str, float]
    """Seconds of a step (forward and backward) in each mode: the mean of the ranks' medians."""
    notes: tuple[str, ...]
    """A line on the times, and one on each mode that failed."""


def choose(
    model: nn.Module,
    example: Batch,
    loss_of: LossOf,
    world: World,
    modes: Sequence[str] = MODES,
    steps: int = 5,
    remaining_steps: float = math.inf,
) -> Chosen:
    """Switch the model to the fastest of `modes`, the same on all ranks. A collective.

    `example` is a rank's share of a batch. `loss_of(model, example)` returns
    the loss as the training step computes it. `steps` is the number of timed steps in each
    mode, `remaining_steps` the number of steps over which the cost of compiling is spread.
    """
    with stage(model, example) as copied:
        mine = {mode: _trial(copied, mode, loss_of, steps) for mode in modes}
    # If all modes fail, the mode is not the cause.
    if copied.first_error is not None and not any(trial.works for trial in mine.values()):
        raise copied.first_error
    trials = together(world, mine)
    name = decide(trials, remaining_steps)
    notes = [_times(trials, name, remaining_steps), *_complaints(trials)]
    seconds = {mode: trial.seconds for mode, trial in trials.items() if trial.works}
    return Chosen(name, applied(model, name), seconds, tuple(notes))


def settle(model: nn.Module, example: Batch, loss_of: LossOf, world: World, name: str) -> Chosen:
    """Switch the model to the mode `name`, or to the next mode that works. A collective.

    `example` and `loss_of` are those of `choose`.
    """
    complaints: list[str] = []
    for mode in reversed(MODES[1 : MODES.index(name) + 1]):
        few = example if mode == COMPILED else _first_two(example)
        with stage(model, few) as copied:
            trials = together(world, {mode: _trial(copied, mode, loss_of, 0)})
        if trials[mode].works:
            return Chosen(mode, applied(model, mode), {}, tuple(complaints))
        complaints += _complaints(trials)
    return Chosen(PLAIN, applied(model, PLAIN), {}, tuple(complaints))


def _first_two(batch: Batch) -> Batch:
    data, target, samples = batch.data[:2], batch.target[:2], batch.samples[:2]
    return replace(batch, data=data, target=target, samples=samples, weight=len(data))


def decide(trials: Mapping[str, Trial], remaining_steps: float) -> str:
    """Return the mode with the least time for the remaining steps, including compiling."""
    return fastest(trials, remaining_steps) or PLAIN


def applied(model: nn.Module, name: str) -> nn.Module:
    """Switch the model to the mode `name`, in place, and return it."""
    if name not in MODES:
        raise ValueError(f"execution {name!r} is not one of {', '.join(MODES)}")
    memory_format = torch.contiguous_format if name == PLAIN else torch.channels_last
    for tensor in [*model.parameters(), *model.buffers()]:
        # Not by Module.to(), which fails for models that also have 5-dimensional tensors.
        if tensor.dim() == 4:
            tensor.data = _in_format(tensor.data, memory_format)
    model._compiled_call_impl = _compiled(model) if name == COMPILED else None
    return model


def _in_format(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a copy with exactly the strides of `memory_format`.

    torch considers a tensor of one channel to have both formats, and does not change its strides,
    but chooses kernels by them (for grey images this made a small model 1.6 times as slow).
    """
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format
    ).copy_(tensor)


def _compiled(model: nn.Module) -> Any:
    """Return the model's compiled call, like Module.compile().

    Module.compile() silently compiles nothing of models that are instances of torch's own classes,
    such as Sequential.
    """

    def call(*args: Any, **named: Any) -> Any:
        # torch does not annotate `_call_impl`.
        return model._call_impl(*args, **named)  # type: ignore[no-untyped-call]

    _keep_compiled_code_private()
    return torch.compile(call)


def _keep_compiled_code_private() -> None:
    """Set a folder of the user for compiled code, unless the user has set one.

    torch executes what it finds there. Its default has a predictable name in the temporary folder,
    where another user of the machine may create it first.
    """
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return
    try:
        folder = private_folder(cache_folder() / "compiled")
    except (ConfigError, OSError):
        folder = Path(tempfile.mkdtemp(prefix="allstep-compiled-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _trial(copied: TrialModel, mode: str, loss_of: LossOf, steps: int) -> Trial:
    compiles = mode == COMPILED
    if compiles and any(isinstance(layer, SyncBatchNorm) for layer in copied.model.modules()):
        return Trial(why_not="its norms communicate with other ranks, which cannot be compiled")
    return copied.trial(loss_of, steps, lambda model: applied(model, mode), compiles)


def _complaints(trials: Mapping[str, Trial]) -> list[str]:
    return [
        f"execution {mode} is not used: {trial.why_not}"
        for mode, trial in trials.items()
        if not trial.works
    ]


def _times(trials: Mapping[str, Trial], name: str, remaining_steps: float) -> str:
    """Return a line with the measured times behind the choice."""
    left = f"; {remaining_steps:.0f} steps are left" if math.isfinite(remaining_steps) else ""
    return f"execution {name}: a step takes {figures(trials)}{left}"
