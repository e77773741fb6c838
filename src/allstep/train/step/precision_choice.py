"""Which precision a run with `precision: auto` computes in, and what an emulated bfloat16 costs.

```
each rank   judge(device)        CPU flags, or the GPU's capability: native, not native, or unknown
all ranks   one answer           float32 if one rank has no bfloat16; bfloat16 if all have it
unknown     timed                a step in each, on a copy of the model (`timing`)
resumed     kept                 the checkpoint's, on any machine; a note names what this one would use
```

An explicit `precision: bfloat16` is never replaced. Where the processor emulates it, both are timed
and a note gives the factor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from allstep.comm.group import agree
from allstep.errors import ConfigError
from allstep.machine import Bfloat16, cpu_bfloat16, cpu_flags
from allstep.train.precision.precision import Precision
from allstep.train.step import execution
from allstep.train.step.timing import (
    Example,
    LossOf,
    Trial,
    fastest,
    figures,
    reason,
    stage,
    together,
)
from allstep.world import World

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
_CAPABILITY = 8  # of the first NVIDIA GPUs that compute in bfloat16
SAMPLES = 32
"""To time a step with, at most: an emulated step of a large batch takes minutes."""
_STEPS = 3  # timed, after one that sets up

Timed = Callable[[], Mapping[str, Trial]]


@dataclass(frozen=True)
class Settled:
    """The precision of a run."""

    name: str
    why: str = ""
    """Why it was chosen, in one line; empty where the user chose it."""
    notes: tuple[str, ...] = ()
    """What the user should know about it, a line each."""


def settle(
    asked: str, kept: str | None, world: World, device: torch.device, timed: Timed
) -> Settled:
    """Settle the precision of a run, the same on all ranks. A collective.

    asked: the config's. kept: that of the checkpoint, in a resumed run. timed: measure both, see
    `time_both`; called on all ranks or on none.
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
    """Whether the processor of this rank computes in bfloat16."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        needed = f"bfloat16 arithmetic comes with {_CAPABILITY}.0"
        return Bfloat16(major >= _CAPABILITY, f"the GPU has capability {major}.{minor}; {needed}")
    found = cpu_bfloat16(cpu_flags())
    if found.native and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Bfloat16(False, "torch's oneDNN has no bfloat16 kernels for this CPU")
    return found


def check_device(device: torch.device) -> None:
    """Raise ConfigError when the device computes in neither: a GPU that this torch is not built
    for."""
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


def time_both(model: nn.Module, example: Example, world: World, name: str) -> Mapping[str, Trial]:
    """Time a training step in float32 and in bfloat16, on a copy of the model. A collective.

    name: the execution to be used; a model that cannot be run that way is timed in the plain one.
    """
    trials: Mapping[str, Trial] = {}
    ways = (
        (execution.PLAIN,)
        if name == execution.PLAIN
        else (execution.CHANNELS_LAST, execution.PLAIN)
    )
    for way in ways:
        trials = together(world, _time_both(model, example, way))
        if any(trial.works for trial in trials.values()):
            break
    return trials


def _time_both(model: nn.Module, example: Example, way: str) -> Mapping[str, Trial]:
    """On this rank, in the execution `way`."""
    with stage(model, example) as copied:
        losses = {name: loss_in(Precision(name, example[0].device)) for name in (FLOAT32, BFLOAT16)}
        return {
            name: copied.trial(loss_of, _STEPS, lambda model: execution.applied(model, way))
            for name, loss_of in losses.items()
        }


def loss_in(precision: Precision) -> LossOf:
    """The loss of a training step, computed in `precision`."""

    def loss_of(model: nn.Module, images: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with precision.autocast():
            return functional.cross_entropy(model(images), target)

    return loss_of


def _of_all(world: World, mine: Bfloat16) -> Bfloat16:
    """One answer: of a rank without bfloat16, else of one that does not know, else of rank 0."""
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
    """The note on an emulated bfloat16, with the measured factor; none where it was not slower."""
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
