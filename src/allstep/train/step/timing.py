"""Timing of alternatives on a copy of the model, and one decision for all ranks.

`execution` and `precision_choice` use it.

```
stage(model, example)      a copy: statistics and random numbers of the run stay as they are
  .trial(loss_of, steps)   one step that sets up, then `steps` timed ones: their median, or an error
together(world, trials)    means over the ranks; a way that failed on one rank has failed
fastest(trials, steps)     the way with the fewest seconds, set-up costs included
```

Every rank makes the same number of steps, because layers such as a synchronized batch norm
communicate in each of them.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median

import torch
from torch import Tensor, nn

from allstep.comm.group import agree
from allstep.console.quantities import milliseconds
from allstep.errors import AllstepError
from allstep.world import World

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
Example = tuple[Tensor, Tensor]
WORTH_IT = 0.97
"""A way must take at most this share of the time of the ways before it; less of a gain is noise."""
COMPILATIONS = 3
"""How often the cost of compiling is paid: training, evaluation, the uneven last batch."""


@dataclass
class Trial:
    """How one way went on one rank, or on all of them."""

    seconds: float = math.inf
    """Of a step; infinite when it failed."""
    cost: float = 0.0
    """Seconds of compiling."""
    why_not: str | None = None

    @property
    def works(self) -> bool:
        return self.why_not is None


@dataclass
class TrialModel:
    """A copy of the model, on which the ways are tried one after the other."""

    model: nn.Module
    example: Example
    first_error: Exception | None = None

    def trial(
        self,
        loss_of: LossOf,
        steps: int,
        prepare: Callable[[nn.Module], object],
        compiles: bool = False,
    ) -> Trial:
        """Time `steps` steps (0: the first one) of `loss_of` after `prepare` has changed the copy.

        compiles: the first step does, so the time by which it is longer is the trial's `cost`.
        """
        try:
            prepare(self.model)
            first = self._step(loss_of)
            usual = median([self._step(loss_of) for _ in range(steps)] or [first])
        except AllstepError:  # a lost peer is no fault of the way
            raise
        except Exception as error:
            self.first_error = self.first_error or error
            return Trial(why_not=reason(error))
        return Trial(usual, max(0.0, first - usual) if compiles else 0.0)

    def _step(self, loss_of: LossOf) -> float:
        started = self._now()
        loss_of(self.model, *self.example).backward()  # type: ignore[no-untyped-call]  # torch's own
        self.model.zero_grad(set_to_none=True)
        return self._now() - started

    def _now(self) -> float:
        if self.example[0].is_cuda:
            torch.cuda.synchronize(self.example[0].device)
        return time.perf_counter()


@contextmanager
def stage(model: nn.Module, example: Example) -> Iterator[TrialModel]:
    """Trials on it change neither the model nor the random numbers of the run."""
    device = example[0].device
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of a way that may not be taken; the run itself shows them
        yield TrialModel(copy.deepcopy(model), example)


def together(world: World, mine: Mapping[str, Trial]) -> dict[str, Trial]:
    """The means over the ranks; a way that failed on any rank has failed."""
    everyone = agree.gather(world, dict(mine))
    return {way: _mean([trials[way] for trials in everyone]) for way in mine}


def _mean(trials: Sequence[Trial]) -> Trial:
    failed = [(rank, trial.why_not) for rank, trial in enumerate(trials) if not trial.works]
    if failed:
        rank, why_not = failed[0]
        return Trial(why_not=why_not if len(failed) == len(trials) else f"{why_not} (rank {rank})")
    return Trial(fmean(trial.seconds for trial in trials), fmean(trial.cost for trial in trials))


def fastest(trials: Mapping[str, Trial], remaining_steps: float = math.inf) -> str | None:
    """The way with the fewest seconds for the steps left, compiling included; None when all failed."""
    best: str | None = None
    for way, trial in trials.items():
        if trial.works and (best is None or _beats(trial, trials[best], remaining_steps)):
            best = way
    return best


def _beats(trial: Trial, other: Trial, remaining_steps: float) -> bool:
    if trial.seconds > WORTH_IT * other.seconds:
        return False
    saved = (other.seconds - trial.seconds) * remaining_steps
    return saved > COMPILATIONS * (trial.cost - other.cost)


def figures(trials: Mapping[str, Trial]) -> str:
    """Milliseconds of a step by way, of the ways that worked."""
    return ", ".join(
        f"{way} {milliseconds(trial.seconds)}{_compiling(trial)}"
        for way, trial in trials.items()
        if trial.works
    )


def _compiling(trial: Trial) -> str:
    return f" (and {trial.cost:.3g} s to compile, {COMPILATIONS} times)" if trial.cost else ""


def reason(error: Exception) -> str:
    """The error in one line."""
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    if type(inner).__name__ == "InvalidCxxCompiler":
        return "there is no C++ compiler; install g++, or set CXX"
    return f"{type(inner).__name__}: {lines[0] if lines else 'no message'}"[:200]
