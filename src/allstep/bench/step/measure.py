"""How much of a rank's speed is left when ranks train one model together?

| contender | what it is |
|---|---|
| independent copies | every rank trains its own model without communication: 100% |
| DDP on Gloo | torch's DistributedDataParallel in its usual form |
| DDP on allstep | the same, on a group of backend "allstep" |
| DistributedOptimizer | `allstep.torch`, with Horovod's interface |
| share_weights | the same with share_weights=True: one copy of the weights per host |
| sync=async | every rank pushes its gradients to shared weights, and waits for no other one |

One set of ranks under `allstep run` runs all contenders, with one torch thread per rank: the same
model with the same initial weights, SGD with momentum and weight decay, and the same synthetic
images at the same step (see `rank`). Their losses have to agree, those of `sync=async` excepted;
otherwise a contender computes something else, and there is no result. Two numbers have the same sum
in either order, so with two ranks all losses agree to the end. More ranks may add in another order,
and rounding differences grow tenfold every few steps (a ResNet turns 1e-7 into 1e-3 in a dozen
steps): then the first steps have to agree, and later ones only roughly.

A turn is a few steps, at least `_SECONDS_PER_TURN` of them, after a barrier. The slowest rank
counts. The machine's speed changes from minute to minute, so only consecutive turns are compared.
In a round every contender has a turn, in groups of two with the independent copies between them::

    DDP on Gloo             independent copies   DDP on allstep
    DistributedOptimizer    independent copies   share_weights
    sync=async              independent copies

Each contender is compared with the independent copies next to it. The first round is a warm-up and
does not count; a last round, which does not count either, measures where the time goes (see
`result`).
"""

import contextlib
import math
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from allstep import machine
from allstep.bench.comm.measure import start_team
from allstep.bench.result import Missing, absences
from allstep.bench.step.result import ALONE, PUSHED, StepResult, StepRow, task_of
from allstep.console import quantities
from allstep.errors import AllstepError, ConfigError
from allstep.process.python import run_module

REPETITIONS = 9
# Phases of the run besides the repetitions: starting, warming up, watching.
NUM_EXTRA = 3
_SECONDS_PER_TURN = 1.0
_LEAST_STEPS = 3
# Memory of a rank in copies of the weights: five models with momentum, gradients, buckets and
# activations.
_COPIES = 16
# Maximum relative difference of losses by float32 rounding, in the first steps.
_SAME_LOSS = 1e-5
_FIRST_STEPS = 5
# The same after these steps, when rounding differences have grown.
_NEAR_LOSS = 0.1

# Independent copies have the same weights in the first step only, ranks that push perhaps never.
NOT_TOGETHER: Mapping[str, int] = {ALONE: 1, PUSHED: 0}

Progress = Callable[[str], None]


class StepFailed(AllstepError):
    """There is no contender to measure, or contenders have different losses."""


@dataclass
class Seen:
    """The measurements of one contender so far; see `StepRow`."""

    nbytes: float
    losses: list[float]
    seconds: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cpu_shares: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


class Turn(NamedTuple):
    """Seconds on the slowest rank, and the mean CPU time of a rank where it is measured."""

    seconds: float
    cpu: float | None


def _record(seen: Seen, turn: Turn, alone: Turn) -> None:
    """Add a turn, with its ratios to that of the independent copies next to it."""
    seen.seconds.append(turn.seconds)
    seen.speeds.append(alone.seconds / turn.seconds)
    if turn.cpu is not None and alone.cpu:
        seen.cpu.append(turn.cpu)
        seen.cpu_shares.append(turn.cpu / alone.cpu)


def measure_step(
    model: str = "alexnet",
    num_ranks: int = 2,
    repetitions: int = REPETITIONS,
    batch: int | None = None,
    progress: Progress = lambda text: None,
) -> StepResult:
    """Time every contender `repetitions` times.

    `model` is a name of `result.TASKS`, `batch` the images per rank and step (default: the task's).
    `progress` is called with the current phase, NUM_EXTRA + `repetitions` times.
    """
    batch = batch or task_of(model).batch
    _check_memory(model, num_ranks)
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        rank = run_module("allstep.bench.step.rank", model, str(batch))
        command = run_module("allstep", "run", "-np", str(num_ranks), *rank)
        progress("starting")
        team = start_team("allstep run", command, num_ranks, folder, ending)
        rounds = StepRounds(team, num_ranks)
        run_rounds(rounds, repetitions, progress)
    return StepResult(model, num_ranks, batch, rounds.steps, rounds.rows(), rounds.absent())


def run_rounds(rounds: "StepRounds", repetitions: int, progress: Progress) -> None:
    """Prepare and measure all contenders."""
    rounds.prepare()
    progress("warming up")
    rounds.warm_up()
    for number in range(1, repetitions + 1):
        progress(f"round {number} of {repetitions}")
        rounds.take()
    progress("watching")
    rounds.watch()


def _check_memory(model: str, num_ranks: int) -> None:
    needed = _COPIES * num_ranks * 4 * task_of(model).num_parameters
    free = machine.memory().available
    if needed > free:
        raise ConfigError(
            f"--model {model} --np {num_ranks} needs about {quantities.nbytes(needed)} of memory,"
            f" {quantities.nbytes(free)} are free: choose a smaller model or fewer ranks"
        )


def round_of(rivals: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the turns of a round: pairs of rivals with the independent copies between them."""
    pairs = [rivals[start : start + 2] for start in range(0, len(rivals), 2)]
    return [(first, ALONE, *second) for first, *second in pairs]


class Ranks(Protocol):
    """Ranks that execute requests: a `Team`, or several of them."""

    names: list[str]

    @abstractmethod
    def request(self, message: dict[str, Any], /) -> list[dict[str, Any]]:
        """Send a request and return the answers of the ranks."""


class StepRounds:
    """The measurements of all contenders of a team, round by round.

    `apart`: contenders whose losses are their own, and for how many steps they are not. `exact`:
    whether losses of all steps have to be the same on two ranks; otherwise those of the first ones.
    """

    def __init__(
        self,
        team: Ranks,
        num_ranks: int,
        apart: Mapping[str, int] = NOT_TOGETHER,
        exact: bool = True,
    ) -> None:
        self._apart, self._exact = apart, exact
        self.steps = _LEAST_STEPS
        self._team = team
        self._num_ranks = num_ranks
        self._seen: dict[str, Seen] = {}
        self._absent: dict[str, str] = {}
        self._turn = 0

    def prepare(self) -> None:
        """Find the available contenders, and check that all start from the same weights."""
        for name in self._team.names:
            if answers := self._request(name, {"prepare": name}):
                losses = _means([answer["losses"] for answer in answers])
                self._seen[name] = Seen(fmean(answer["nbytes"] for answer in answers), losses)
        self._check_losses({name: seen.losses[:1] for name, seen in self._seen.items()})

    def warm_up(self) -> None:
        """Compute the number of steps of a turn, and run a round that does not count."""
        seconds = self._train(ALONE).seconds
        self.steps = max(_LEAST_STEPS, math.ceil(_SECONDS_PER_TURN / seconds * _LEAST_STEPS))
        self.take()
        for seen in self._seen.values():
            for figures in (seen.seconds, seen.speeds, seen.cpu, seen.cpu_shares):
                figures.clear()

    def take(self) -> None:
        """Run one round."""
        self._turn += 1
        for neighbours in round_of(self._rivals):
            turns = {name: self._train(name) for name in neighbours}
            for name in neighbours:
                if seen := self._seen.get(name):
                    _record(seen, turns[name], turns[ALONE])
        self._check_losses({name: self._seen[name].losses for name in self._rivals})

    def watch(self) -> None:
        """Run a round that does not count, and record where the time goes."""
        self._turn += 1
        for name in list(self._seen):
            order = {"watch": name, "turn": self._turn, "steps": self.steps}
            if answers := [answer["parts"] for answer in self._request(name, order)]:
                parts = dict.fromkeys(part for answer in answers for part in answer)
                self._seen[name].parts = {
                    part: fmean(answer.get(part, 0.0) for answer in answers) for part in parts
                }

    def rows(self) -> list[StepRow]:
        """Return a row for each contender."""
        return [StepRow(name, **vars(seen)) for name, seen in self._seen.items()]

    def absent(self) -> list[Missing]:
        """Return the contenders that failed, with the reason."""
        return [Missing(name, reason) for name, reason in self._absent.items()]

    @property
    def _rivals(self) -> list[str]:
        return [name for name in self._seen if name != ALONE]

    def _check_losses(self, losses: Mapping[str, Sequence[float]]) -> None:
        if not self._rivals:
            raise StepFailed(f"no contender can be measured: {'; '.join(absences(self.absent()))}")
        together = {
            name: each
            for name, each in losses.items()
            if name not in self._apart or len(each) <= self._apart[name]
        }
        check_losses(together, self._num_ranks if self._exact else math.inf)

    def _train(self, name: str) -> Turn:
        """Run a turn; its seconds are infinite if the contender failed."""
        answers = self._request(name, {"train": name, "turn": self._turn, "steps": self.steps})
        if not answers:
            return Turn(math.inf, None)
        self._seen[name].losses += _means([answer["losses"] for answer in answers])
        cpu = [answer["cpu"] for answer in answers if "cpu" in answer]
        return Turn(max(answer["seconds"] for answer in answers), fmean(cpu) if cpu else None)

    def _request(self, name: str, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the ranks' answers; none if the contender failed on a rank.

        A failed contender is dropped and listed as absent.
        """
        answers = self._team.request(order)
        reasons = "; ".join(
            dict.fromkeys(answer["failed"] for answer in answers if "failed" in answer)
        )
        if not reasons:
            return answers
        if name == ALONE:
            raise StepFailed(f"{ALONE}: {reasons}")
        self._absent[name] = f"it fails here: {reasons}"
        self._seen.pop(name, None)
        self._team.request({"drop": name})
        return []


def _means(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over the ranks for each step."""
    return [fmean(losses) for losses in zip(*by_rank, strict=True)]


def check_losses(losses: Mapping[str, Sequence[float]], num_ranks: float) -> None:
    """Raise StepFailed unless all contenders have the same losses at each step."""
    (first, expected), *others = losses.items()
    for name, found in others:
        for step, (one, other) in enumerate(zip(expected, found, strict=True), 1):
            allowed = _SAME_LOSS if num_ranks <= 2 or step <= _FIRST_STEPS else _NEAR_LOSS
            # Written with `not`, so that NaN fails.
            if not abs(one - other) <= allowed * abs(one):
                raise StepFailed(
                    f"{first} and {name} do not learn the same: at step {step} their losses are"
                    f" {one:.6f} and {other:.6f}, which differ by more than {allowed:g} of their"
                    " size"
                )
