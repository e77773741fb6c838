"""How much of a rank's speed is left when ranks train one model together?

====================
====================================================================================================
independent copies    every rank trains a model of its own, and nobody talks: 100% DDP on Gloo
torch's DistributedDataParallel, as everybody has it DDP on allstep        the same, on a group of
backend "allstep" DistributedOptimizer  `allstep.torch`: Horovod's way share_weights         the
same with share_weights=True: one copy of the weights for all ranks of the host ====================
====================================================================================================

One set of ranks under `allstep run` has all of them, one torch thread per rank: the same model with
the same first weights, SGD with momentum and weight decay, the same made-up images at the same step
(see `rank`). Their losses have to be the same too; where they part, somebody computes something
else, and there is no result. Two numbers have the same sum in either order, so with two ranks all
losses agree to the end. More ranks may add in another order, and what begins as rounding grows
tenfold every few steps (a ResNet turns 1e-7 into 1e-3 in a dozen): then the first steps have to
agree, and later ones may not be far apart.

A turn is a few steps, at least `_SECONDS_PER_TURN` of them, behind a barrier. It counts with its
slowest rank. The machine's own pace changes from minute to minute, so speeds are compared between
neighbours only. In a round everybody has a turn, two by two with the independent copies in their
midst::

    DDP on Gloo   independent copies   DDP on allstep   |   DistributedOptimizer   independent copies   share_weights

Each is compared with the independent copies beside it. The first round warms up and does not count;
a last one, which does not count either, is watched (see `result`).
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from allstep import machine
from allstep.bench.comm.measure import Team, start_team
from allstep.bench.result import Missing, absences
from allstep.bench.step.result import ALONE, StepResult, StepRow, task_of
from allstep.console import quantities
from allstep.errors import AllstepError, ConfigError
from allstep.process.python import run_module

REPETITIONS = 9
NUM_EXTRA = 3  # parts of the run that are no repetition: starting, warming up, watching
_SECONDS_PER_TURN = 1.0
_LEAST_STEPS = 3
# of the weights that a rank may hold: five models with momentum, gradients, buckets, activations
_COPIES = 16
_SAME_LOSS = 1e-5  # relative: what a float32 leaves open
_NEAR_LOSS = 0.1  # relative: where rounding has had time to grow
_FIRST_STEPS = 5  # in which it has not

Progress = Callable[[str], None]


class StepFailed(AllstepError):
    """There is nothing to compare with, or contenders do not learn the same."""


@dataclass
class Seen:
    """What was seen of one contender so far."""

    nbytes: float
    losses: list[float]
    seconds: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


def measure_step(
    model: str = "alexnet",
    num_ranks: int = 2,
    repetitions: int = REPETITIONS,
    batch: int | None = None,
    progress: Progress = lambda text: None,
) -> StepResult:
    """Time everybody `repetitions` times. batch: images of a rank at a step.

    `progress` is told where we are, NUM_EXTRA times more.
    """
    batch = batch or task_of(model).batch
    _check_memory(model, num_ranks)
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        rank = run_module("allstep.bench.step.rank", model, str(batch))
        command = run_module("allstep", "run", "-np", str(num_ranks), *rank)
        progress("starting")
        rounds = StepRounds(
            start_team("allstep run", command, num_ranks, folder, ending), num_ranks
        )
        rounds.prepare()
        progress("warming up")
        rounds.warm_up()
        for number in range(1, repetitions + 1):
            progress(f"round {number} of {repetitions}")
            rounds.take()
        progress("watching")
        rounds.watch()
    return StepResult(model, num_ranks, batch, rounds.steps, rounds.rows(), rounds.absent())


def _check_memory(model: str, num_ranks: int) -> None:
    needed, free = (
        _COPIES * num_ranks * 4 * task_of(model).num_parameters,
        machine.memory().available,
    )
    if needed > free:
        raise ConfigError(
            f"--model {model} --np {num_ranks} needs about {quantities.nbytes(needed)} of memory,"
            f" {quantities.nbytes(free)} are free: take a smaller net or fewer ranks"
        )


def round_of(rivals: Sequence[str]) -> list[tuple[str, ...]]:
    """A round's turns, in groups of neighbours: two rivals with the independent copies in their
    midst."""
    pairs = [rivals[start : start + 2] for start in range(0, len(rivals), 2)]
    return [(first, ALONE, *second) for first, *second in pairs]


class StepRounds:
    """All contenders of a team, round by round."""

    def __init__(self, team: Team, num_ranks: int) -> None:
        self.steps = _LEAST_STEPS
        self._team = team
        self._num_ranks = num_ranks
        self._seen: dict[str, Seen] = {}
        self._absent: dict[str, str] = {}
        self._turn = 0

    def prepare(self) -> None:
        """See who is there, and whether all start from the same weights."""
        for name in self._team.names:
            if answers := self._tell(name, {"prepare": name}):
                losses = _means([answer["losses"] for answer in answers])
                self._seen[name] = Seen(fmean(answer["nbytes"] for answer in answers), losses)
        self._check_losses({name: seen.losses[:1] for name, seen in self._seen.items()})

    def warm_up(self) -> None:
        """See how many steps make a turn, and take a round that does not count."""
        seconds = self._train(ALONE)
        self.steps = max(_LEAST_STEPS, math.ceil(_SECONDS_PER_TURN / seconds * _LEAST_STEPS))
        self.take()
        for seen in self._seen.values():
            seen.seconds.clear()
            seen.speeds.clear()

    def take(self) -> None:
        """One round."""
        self._turn += 1
        for neighbours in round_of(self._rivals):
            seconds = {name: self._train(name) for name in neighbours}
            for name in neighbours:
                if seen := self._seen.get(name):
                    seen.seconds.append(seconds[name])
                    seen.speeds.append(seconds[ALONE] / seconds[name])
        self._check_losses({name: self._seen[name].losses for name in self._rivals})

    def watch(self) -> None:
        """A round that does not count: where the time goes."""
        self._turn += 1
        for name in list(self._seen):
            order = {"watch": name, "turn": self._turn, "steps": self.steps}
            if answers := [answer["parts"] for answer in self._tell(name, order)]:
                parts = dict.fromkeys(part for answer in answers for part in answer)
                self._seen[name].parts = {
                    part: fmean(answer.get(part, 0.0) for answer in answers) for part in parts
                }

    def rows(self) -> list[StepRow]:
        return [StepRow(name, **vars(seen)) for name, seen in self._seen.items()]

    def absent(self) -> list[Missing]:
        return [Missing(name, reason) for name, reason in self._absent.items()]

    @property
    def _rivals(self) -> list[str]:
        return [name for name in self._seen if name != ALONE]

    def _check_losses(self, losses: Mapping[str, Sequence[float]]) -> None:
        if not self._rivals:
            raise StepFailed(f"there is nobody to measure: {'; '.join(absences(self.absent()))}")
        check_losses(losses, self._num_ranks)

    def _train(self, name: str) -> float:
        """Seconds of the slowest rank; infinite when the contender failed."""
        answers = self._tell(name, {"train": name, "turn": self._turn, "steps": self.steps})
        if answers:
            self._seen[name].losses += _means([answer["losses"] for answer in answers])
        return max((answer["seconds"] for answer in answers), default=math.inf)

    def _tell(self, name: str, order: dict[str, Any]) -> list[dict[str, Any]]:
        """The ranks' answers; none when the contender failed on one of them: it is then absent."""
        answers = self._team.tell(order)
        reasons = "; ".join(
            dict.fromkeys(answer["failed"] for answer in answers if "failed" in answer)
        )
        if not reasons:
            return answers
        if name == ALONE:
            raise StepFailed(f"{ALONE}: {reasons}")
        self._absent[name] = f"it fails here: {reasons}"
        self._seen.pop(name, None)
        self._team.tell({"drop": name})
        return []


def _means(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Step by step, over the ranks."""
    return [fmean(losses) for losses in zip(*by_rank, strict=True)]


def check_losses(losses: Mapping[str, Sequence[float]], num_ranks: int) -> None:
    """Raises StepFailed unless all contenders have the same losses, step by step."""
    (first, expected), *others = losses.items()
    for name, found in others:
        for step, (one, other) in enumerate(zip(expected, found, strict=True), 1):
            allowed = _SAME_LOSS if num_ranks <= 2 or step <= _FIRST_STEPS else _NEAR_LOSS
            if not abs(one - other) <= allowed * abs(one):  # NaN does not pass
                raise StepFailed(
                    f"{first} and {name} do not learn the same: at step {step} their losses are"
                    f" {one:.6f} and {other:.6f}, which differ by more than {allowed:g} of their"
                    " size"
                )
