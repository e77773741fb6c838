"""How the net is run: plain, channels-last or compiled. Which is fastest depends on net, batch and machine, so it is tried out.

```
plain           weights as torch makes them
channels-last   the channels of a pixel lie side by side, as the convolutions of CPUs and of newer GPUs like it
compiled        channels-last, and torch.compile makes one program of the net; that takes its time, and a C++ compiler on a CPU
```

`choose` runs a few training steps each way, on a copy, so that the net's statistics and the random numbers of the run are as if nothing
had been. The ranks add up their times and take the same way. Compiling must pay for itself in the steps that the run has left; it
counts three times, because evaluation and the uneven last batch of an epoch are compiled too. A way that fails is left out, and a note
says why in one line.

`settle` is for a way that the user has fixed: one step of two samples (to compile: of all) shows whether the net can be run that way; if
not, it falls back along compiled -> channels-last -> plain. A net that flattens with `view` instead of `flatten`, say, cannot be
channels-last.

`applied` puts a net into a way, in place. Names of weights stay, so checkpoints do not know about it. Another way adds numbers in another
order: a run that was resumed to the same bits must take the way that its first part had, not choose again.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from allstep.errors import AllstepError
from allstep.norm import SyncBatchNorm
from allstep.train import agree
from allstep.world import World

PLAIN, CHANNELS_LAST, COMPILED = WAYS = ("plain", "channels-last", "compiled")
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
Example = tuple[Tensor, Tensor]
_COMPILATIONS = 3  # training, evaluation, the uneven last batch
_WORTH_IT = 0.97  # a way must be so much faster than one that comes before it; less is noise


@dataclass(frozen=True)
class Chosen:
    """The way that was taken, and why."""

    name: str
    net: nn.Module
    """The net that was given, in that way."""
    seconds: Mapping[str, float]
    """Of a step, forward and backward, by way: the mean over the ranks of their medians."""
    notes: tuple[str, ...]
    """A line on the times, and one on each way that was left out."""


@dataclass
class Trial:
    """How one way went on one rank."""

    seconds: float = math.inf
    """Of a step; infinite when it failed."""
    cost: float = 0.0
    """Of compiling."""
    why_not: str | None = None

    @property
    def works(self) -> bool:
        return self.why_not is None


def choose(
    net: nn.Module,
    example: Example,
    loss_of: LossOf,
    world: World,
    ways: Sequence[str] = WAYS,
    steps: int = 5,
    remaining_steps: float = math.inf,
) -> Chosen:
    """The fastest of `ways` for this net, applied to it. A collective: all ranks choose together.

    example: input and target of a rank's share of a batch. loss_of(net, input, target): the loss, as the training step computes it.
    """
    with _stage(net, example, loss_of) as stage:
        mine = {way: stage.trial(way, steps) for way in ways}
    if stage.first_error is not None and not any(trial.works for trial in mine.values()):
        raise stage.first_error  # not a matter of the way
    trials = _together(world, mine)
    name = decide(trials, remaining_steps)
    notes = [_times(trials, name, remaining_steps), *_complaints(trials)]
    seconds = {way: trial.seconds for way, trial in trials.items() if trial.works}
    return Chosen(name, applied(net, name), seconds, tuple(notes))


def settle(net: nn.Module, example: Example, loss_of: LossOf, world: World, name: str) -> Chosen:
    """The way `name`, applied to the net, or the nearest one in which it can be run. A collective like `choose`."""
    complaints: list[str] = []
    for way in reversed(WAYS[1 : WAYS.index(name) + 1]):
        few = example if way == COMPILED else (example[0][:2], example[1][:2])
        with _stage(net, few, loss_of) as stage:
            trials = _together(world, {way: stage.trial(way, 0)})
        if trials[way].works:
            return Chosen(way, applied(net, way), {}, tuple(complaints))
        complaints += _complaints(trials)
    return Chosen(PLAIN, applied(net, PLAIN), {}, tuple(complaints))


def decide(trials: Mapping[str, Trial], remaining_steps: float) -> str:
    """The way with the fewest seconds for the steps that are left, compiling included."""
    best: str | None = None
    for way, trial in trials.items():
        if trial.works and (best is None or _beats(trial, trials[best], remaining_steps)):
            best = way
    return best or PLAIN


def _beats(trial: Trial, other: Trial, remaining_steps: float) -> bool:
    if trial.seconds > _WORTH_IT * other.seconds:
        return False
    saved = (other.seconds - trial.seconds) * remaining_steps
    return saved > _COMPILATIONS * (trial.cost - other.cost)


def applied(net: nn.Module, name: str) -> nn.Module:
    """The same net, in that way from now on."""
    if name not in WAYS:
        raise ValueError(f"layout {name!r} is not one of {', '.join(WAYS)}")
    memory_format = torch.contiguous_format if name == PLAIN else torch.channels_last
    for tensor in [*net.parameters(), *net.buffers()]:
        if tensor.dim() == 4:  # torch's own Module.to() refuses nets that have 5-dimensional ones as well
            tensor.data = _laid_out(tensor.data, memory_format)
    net._compiled_call_impl = _compiled(net) if name == COMPILED else None
    return net


def _laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """With the strides of that format in any case: a tensor of one channel counts as laid out either way, and torch looks at its strides
    to choose its kernels (a grey picture's first convolution made a small net 1.6 times as slow)."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format).copy_(
        tensor
    )


def _compiled(net: nn.Module) -> Any:
    """As Module.compile() does it; but that silently compiles nothing of nets that are one of torch's own classes, like Sequential."""

    def call(*args: Any, **named: Any) -> Any:
        return net._call_impl(*args, **named)  # type: ignore[no-untyped-call]  # torch's own

    return torch.compile(call)


@dataclass
class _Stage:
    """A copy of the net, on which the ways are tried one after the other."""

    net: nn.Module
    example: Example
    loss_of: LossOf
    first_error: Exception | None = None

    def trial(self, way: str, steps: int) -> Trial:
        if way == COMPILED and any(isinstance(layer, SyncBatchNorm) for layer in self.net.modules()):
            return Trial(why_not="its norms talk to the other ranks, which cannot be compiled")
        try:
            applied(self.net, way)
            first = self._step()
            usual = median([self._step() for _ in range(steps)] or [first])
        except AllstepError:  # a lost peer is no fault of the way
            raise
        except Exception as error:
            self.first_error = self.first_error or error
            return Trial(why_not=reason(error))
        return Trial(usual, max(0.0, first - usual) if way == COMPILED else 0.0)

    def _step(self) -> float:
        started = self._now()
        self.loss_of(self.net, *self.example).backward()  # type: ignore[no-untyped-call]  # torch's own
        self.net.zero_grad(set_to_none=True)
        return self._now() - started

    def _now(self) -> float:
        if self.example[0].is_cuda:
            torch.cuda.synchronize(self.example[0].device)
        return time.perf_counter()


@contextmanager
def _stage(net: nn.Module, example: Example, loss_of: LossOf) -> Iterator[_Stage]:
    """Whatever happens on it leaves no trace in the net and in the random numbers of the run."""
    device = example[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a way that may not be taken; the run itself shows them
        yield _Stage(copy.deepcopy(net), example, loss_of)


def reason(error: Exception) -> str:
    """The error in one line."""
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    if type(inner).__name__ == "InvalidCxxCompiler":
        return "there is no C++ compiler; install g++, or set CXX"
    return f"{type(inner).__name__}: {lines[0] if lines else 'no message'}"[:200]


def _together(world: World, mine: Mapping[str, Trial]) -> dict[str, Trial]:
    """The means over the ranks; a way that failed on any rank has failed."""
    everyone = agree.gather(world, dict(mine))
    return {way: _mean([trials[way] for trials in everyone]) for way in mine}


def _mean(trials: Sequence[Trial]) -> Trial:
    failed = [(rank, trial.why_not) for rank, trial in enumerate(trials) if not trial.works]
    if failed:
        rank, why_not = failed[0]
        return Trial(why_not=why_not if len(failed) == len(trials) else f"{why_not} (rank {rank})")
    return Trial(fmean(trial.seconds for trial in trials), fmean(trial.cost for trial in trials))


def _complaints(trials: Mapping[str, Trial]) -> list[str]:
    return [f"layout {way} was left out: {trial.why_not}" for way, trial in trials.items() if not trial.works]


def _times(trials: Mapping[str, Trial], name: str, remaining_steps: float) -> str:
    """The figures behind the choice."""
    figures = [
        f"{way} {1000 * trial.seconds:.3g} ms{_compiling(trial)}" for way, trial in trials.items() if trial.works
    ]
    left = f"; {remaining_steps:.0f} steps are left" if math.isfinite(remaining_steps) else ""
    return f"layout {name}: a step takes {', '.join(figures)}{left}"


def _compiling(trial: Trial) -> str:
    return f" (and {trial.cost:.3g} s to compile, {_COMPILATIONS} times)" if trial.cost else ""
