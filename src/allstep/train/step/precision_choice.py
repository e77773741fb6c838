"""The choice of precision for `precision: auto`, and the cost of an emulated bfloat16.

```
each rank   judge(device)    by CPU flags or GPU capability: bfloat16 native, not native, unknown
all ranks   one answer       float32 if one rank has no bfloat16; bfloat16 if all have it
unknown     measured         a step in each precision, on a copy of the model (`timing`)
resumed     kept             the checkpoint's, on any machine; a note names the precision that a
                             new run would use here
```

An explicit `precision: bfloat16` is never replaced. If the processor emulates it, a step in each
precision is timed, and a note gives the factor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.errors import ConfigError
from allstep.machine import Bfloat16, cpu_bfloat16, cpu_flags
from allstep.train.precision.precision import Precision
from allstep.train.step import execution
from allstep.train.step.timing import (
    LossOf,
    Trial,
    fastest,
    figures,
    reason,
    stage,
    together,
)
from allstep.train.task.task import Task, as_losses
from allstep.world import World

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
# Compute capability of the first NVIDIA GPUs with bfloat16 arithmetic.
_CAPABILITY = 8
SAMPLES = 32
"""Largest number of samples of a timed step: an emulated step of a large batch takes minutes."""
# Timed steps, after one untimed step that includes set-up.
_STEPS = 3

Timed = Callable[[], Mapping[str, Trial]]


@dataclass(frozen=True)
class Settled:
    """The precision of a run."""

    name: str
    why: str = ""
    """The reason for the choice, in one line; empty if the user chose it."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the choice, one line each."""


def settle(
    asked: str, kept: str | None, world: World, device: torch.device, timed: Timed
) -> Settled:
    """Return the precision of a run, the same on all ranks. A collective.

    `asked` is the precision of the config, `kept` that of the checkpoint in a resumed run. `timed`
    measures a step in both precisions (`time_both`); it is called on all ranks or on none.
    """
    if asked == AUTO:
        agree.everyone(world, lambda: check_device(device))
        found = _of_all(world, judge(device))
        return _chosen(found, timed) if kept is None else _kept(kept, found)
    if asked != BFLOAT16:
        return Settled(asked)
    found = _of_all(world, judge(device))
    return Settled(asked, notes=() if found.native else _emulated(found, timed()))


def judge(device: torch.device) -> Bfloat16:
    """Return whether the processor of this rank computes natively in bfloat16, with the reason."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        needed = f"bfloat16 arithmetic comes with {_CAPABILITY}.0"
        return Bfloat16(major >= _CAPABILITY, f"the GPU has capability {major}.{minor}; {needed}")
    found = cpu_bfloat16(cpu_flags())
    if found.native and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Bfloat16(False, "torch's oneDNN has no bfloat16 kernels for this CPU")
    return found


def check_device(device: torch.device) -> None:
    """Raise ConfigError if the device computes in neither float32 nor bfloat16.

    This happens with a GPU for which this torch is not built.
    """
    problems = [_problem(device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    if all(problems):
        raise ConfigError(
            f"precision=auto: device {device} computes in neither float32 nor bfloat16"
            f" ({problems[0]}); set device=cpu, or install a torch that is built for this device"
        )


def _problem(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        square = torch.ones(2, 2, device=device, dtype=dtype)
        (square @ square).sum().item()
    except (RuntimeError, NotImplementedError) as error:
        return reason(error)
    return None


def time_both(
    model: nn.Module, example: Batch, task: Task, world: World, name: str
) -> Mapping[str, Trial]:
    """Measure a training step in float32 and in bfloat16, on a copy of the model. A collective.

    `name` is the execution mode; a model that does not work in it is measured in the plain mode.
    """
    trials: Mapping[str, Trial] = {}
    plain_only = name == execution.PLAIN
    modes = (execution.PLAIN,) if plain_only else (execution.CHANNELS_LAST, execution.PLAIN)
    for mode in modes:
        trials = together(world, _time_both(model, example, task, mode))
        if any(trial.works for trial in trials.values()):
            break
    return trials


def _time_both(model: nn.Module, example: Batch, task: Task, mode: str) -> Mapping[str, Trial]:
    """Measure both precisions on this rank, in the execution mode `mode`."""
    with stage(model, example) as copied:
        device = example.data.device
        losses = {name: loss_in(Precision(name, device), task) for name in (FLOAT32, BFLOAT16)}
        return {
            name: copied.trial(loss_of, _STEPS, lambda model: execution.applied(model, mode))
            for name, loss_of in losses.items()
        }


def loss_in(precision: Precision, task: Task) -> LossOf:
    """Return a function that computes the loss of a training step in `precision`."""

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        with precision.autocast():
            return as_losses(task.losses(model, batch)).values.mean()

    return loss_of


def _of_all(world: World, mine: Bfloat16) -> Bfloat16:
    """Return one answer for all ranks.

    It is the answer of a rank without bfloat16, else of a rank where that is unknown, else of
    rank 0.
    """
    answers = agree.gather(world, (mine, world.host))
    several = len({host for _, host in answers}) > 1
    for native in (False, None, True):
        for found, host in answers:
            if found.native is native:
                return Bfloat16(native, f"on {host}: {found.why}" if several else found.why)
    raise AssertionError("a world has a rank")


def _chosen(found: Bfloat16, timed: Timed) -> Settled:
    if found.native is not None:
        return Settled(BFLOAT16 if found.native else FLOAT32, found.why)
    trials = timed()
    # A model that fails in both fails again in its first step, with its own message.
    name, times = fastest(trials) or FLOAT32, figures(trials) or "no time that could be measured"
    return Settled(name, f"{found.why}; a step takes {times}")


def _kept(kept: str, found: Bfloat16) -> Settled:
    here = kept if found.native is None else BFLOAT16 if found.native else FLOAT32
    note = (
        f"precision {kept} is kept from the start of the run; a new run would use {here} here:"
        f" {found.why}"
    )
    return Settled(kept, "kept from the start of the run", () if here == kept else (note,))


def _emulated(found: Bfloat16, trials: Mapping[str, Trial]) -> tuple[str, ...]:
    """Return a note on an emulated bfloat16 with the measured factor; none if it is not slower."""
    exact, rough = trials[FLOAT32], trials[BFLOAT16]
    if not (exact.works and rough.works):
        return (f"bfloat16 is emulated: {found.why}; precision=float32 may be faster",)
    factor = rough.seconds / exact.seconds
    if factor <= 1:
        return ()
    return (
        (
            f"bfloat16 is emulated: {found.why}; a step takes {factor:.2g} times as long as in"
            f" float32 ({figures(trials)}): precision=auto or precision=float32 is faster"
        ),
    )
