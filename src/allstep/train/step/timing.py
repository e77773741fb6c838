"""Timing of alternatives on a copy of the model, and one decision for all ranks.

An alternative is an execution mode (`execution`) or a precision (`precision_choice`).

```
stage(model, example)      a copy: statistics and random numbers of the run do not change
  .trial(loss_of, steps)   one set-up step, then `steps` timed ones: their median, or an error
together(world, trials)    means over the ranks; an alternative that failed on one rank has failed
fastest(trials, steps)     the alternative with the least time, including the cost of set-up
```

Every rank runs the same number of steps, because layers such as a synchronized batch norm
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
from allstep.data import Batch
from allstep.errors import AllstepError
from allstep.world import World

LossOf = Callable[[nn.Module, Batch], Tensor]
WORTH_IT = 0.97
"""Largest ratio of an alternative's time to the best before it; a smaller gain counts as noise."""
COMPILATIONS = 3
"""Number of compilations of a run: for training, evaluation and the uneven last batch."""


@dataclass
class Trial:
    """The measurement of one alternative, on one rank or as the mean of all ranks."""

    seconds: float = math.inf
    """Seconds of a step; infinite if the alternative failed."""
    cost: float = 0.0
    """Seconds of compiling."""
    why_not: str | None = None
    """The reason why the alternative failed; None if it works."""

    @property
    def works(self) -> bool:
        """Whether the alternative ran without an error."""
        return self.why_not is None


@dataclass
class TrialModel:
    """A copy of the model, on which the alternatives are measured one after the other."""

    model: nn.Module
    example: Batch
    first_error: Exception | None = None

    def trial(
        self,
        loss_of: LossOf,
        steps: int,
        prepare: Callable[[nn.Module], object],
        compiles: bool = False,
    ) -> Trial:
        """Measure `steps` training steps of `loss_of`, after `prepare` has changed the copy.

        With `steps` 0 only the first step is measured, which includes set-up. `compiles` means that
        the first step compiles: the time by which it is longer is the `cost` of the trial.
        """
        try:
            prepare(self.model)
            first = self._step(loss_of)
            usual = median([self._step(loss_of) for _ in range(steps)] or [first])
        # A lost rank, for example: not caused by the alternative.
        except AllstepError:
            raise
        except Exception as error:
            self.first_error = self.first_error or error
            return Trial(why_not=reason(error))
        return Trial(usual, max(0.0, first - usual) if compiles else 0.0)

    def _step(self, loss_of: LossOf) -> float:
        started = self._now()
        # torch does not annotate `backward`.
        loss_of(self.model, self.example).backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)
        return self._now() - started

    def _now(self) -> float:
        if self.example.data.is_cuda:
            torch.cuda.synchronize(self.example.data.device)
        return time.perf_counter()


@contextmanager
def stage(model: nn.Module, example: Batch) -> Iterator[TrialModel]:
    """Yield a copy of the model for trials, which do not change the run's random numbers."""
    device = example.data.device
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        warnings.catch_warnings(),
    ):
        # The alternative may not be chosen; if it is, the run itself shows the warnings.
        warnings.simplefilter("ignore")
        yield TrialModel(copy.deepcopy(model), example)


def together(world: World, mine: Mapping[str, Trial]) -> dict[str, Trial]:
    """Return the means over the ranks. A collective.

    An alternative that failed on any rank has failed.
    """
    everyone = agree.gather(world, dict(mine))
    return {name: _mean([trials[name] for trials in everyone]) for name in mine}


def _mean(trials: Sequence[Trial]) -> Trial:
    failed = [(rank, trial.why_not) for rank, trial in enumerate(trials) if not trial.works]
    if failed:
        rank, why_not = failed[0]
        return Trial(why_not=why_not if len(failed) == len(trials) else f"{why_not} (rank {rank})")
    return Trial(fmean(trial.seconds for trial in trials), fmean(trial.cost for trial in trials))


def fastest(trials: Mapping[str, Trial], remaining_steps: float = math.inf) -> str | None:
    """Return the alternative with the least time for the remaining steps, including compiling.

    Return None if all alternatives failed.
    """
    best: str | None = None
    for name, trial in trials.items():
        if trial.works and (best is None or _beats(trial, trials[best], remaining_steps)):
            best = name
    return best


def _beats(trial: Trial, other: Trial, remaining_steps: float) -> bool:
    if trial.seconds > WORTH_IT * other.seconds:
        return False
    saved = (other.seconds - trial.seconds) * remaining_steps
    return saved > COMPILATIONS * (trial.cost - other.cost)


def figures(trials: Mapping[str, Trial]) -> str:
    """Return a text with the milliseconds of a step for each alternative that worked."""
    return ", ".join(
        f"{name} {milliseconds(trial.seconds)}{_compiling(trial)}"
        for name, trial in trials.items()
        if trial.works
    )


def _compiling(trial: Trial) -> str:
    return f" (and {trial.cost:.3g} s to compile, {COMPILATIONS} times)" if trial.cost else ""


def reason(error: Exception) -> str:
    """Return the error as one line of text."""
    inner = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    if type(inner).__name__ == "InvalidCxxCompiler":
        return "there is no C++ compiler; install g++, or set CXX"
    return f"{type(inner).__name__}: {lines[0] if lines else 'no message'}"[:200]
