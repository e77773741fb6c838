"""`allstep bench recover --part quiet`: what a step costs in an elastic run that loses no worker.

Two sets of two ranks run the same program (`quiet_rank`), one set in an elastic world and one in a
fixed world. They train in turns, in changing order, while the other set waits, so that a busy
minute of the machine affects both:

    fixed  elastic | elastic  fixed | fixed  elastic | ...      each turn about a second

The ratio of each pair counts. Two processes may differ in speed by chance, for example by where
their memory is. So both sets are started again after every third pair.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from allstep.bench.comm.measure import Team, start_team
from allstep.console.rich_table import figure_columns
from allstep.process.python import run_module

_NUM_WORKERS = 2
_PAIRS_PER_START = 3
_SECONDS_PER_TURN = 1.0
# A multiple of the steps between two commits.
_LEAST_STEPS = 10
FIXED, ELASTIC = "fixed", "elastic"
# Of a step in a fixed world.
RATIO_TARGET = 1.01

Progress = Callable[[str], None]


@dataclass(frozen=True)
class QuietPair:
    """Seconds of a step in two neighboring turns."""

    fixed: float
    elastic: float

    @property
    def ratio(self) -> float:
        """The elastic step as a multiple of the fixed one."""
        return self.elastic / self.fixed


@dataclass(frozen=True)
class QuietRow:
    """All pairs of turns."""

    pairs: tuple[QuietPair, ...]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(pair.ratio for pair in self.pairs)

    def table(self) -> Table:
        """Return milliseconds of a step in both worlds, and the ratio."""
        figures = ["fixed ms", "elastic ms", "ratio", "min", "max", "target"]
        table = figure_columns([""], figures)
        ratios = [pair.ratio for pair in self.pairs]
        seconds = [median(pair.fixed for pair in self.pairs)]
        seconds.append(median(pair.elastic for pair in self.pairs))
        shown = [f"{each:.3f}" for each in (self.ratio, min(ratios), max(ratios), RATIO_TARGET)]
        name = f"small CNN, {_NUM_WORKERS} workers"
        table.add_row(name, *(f"{1e3 * each:.2f}" for each in seconds), *shown)
        return table

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        return {
            "name": "quiet",
            "fixed": [pair.fixed for pair in self.pairs],
            "elastic": [pair.elastic for pair in self.pairs],
            "ratios": [pair.ratio for pair in self.pairs],
            "median": self.ratio,
            "target": RATIO_TARGET,
        }


def measure_quiet(
    repetitions: int,
    progress: Progress = lambda name: None,
    seconds_per_turn: float = _SECONDS_PER_TURN,
) -> QuietRow:
    """Return `repetitions` pairs of turns; call `progress` before each."""
    pairs: list[QuietPair] = []
    while len(pairs) < repetitions:
        with contextlib.ExitStack() as ending:
            place = tempfile.TemporaryDirectory(prefix="allstep-bench-")
            folder = Path(ending.enter_context(place))
            teams = {name: _start(name, folder, ending) for name in (FIXED, ELASTIC)}
            num_steps = _num_steps(teams[FIXED], seconds_per_turn)
            for name in teams:
                _train(teams[name], num_steps)
            for _ in range(min(_PAIRS_PER_START, repetitions - len(pairs))):
                progress("no worker lost")
                pairs.append(_pair(teams, num_steps, is_reversed=len(pairs) % 2 == 1))
    return QuietRow(tuple(pairs))


def _start(name: str, folder: Path, ending: contextlib.ExitStack) -> Team:
    np = ["-np", str(_NUM_WORKERS)]
    if name == ELASTIC:
        np += ["--min-np", "1", "--max-np", str(_NUM_WORKERS)]
    command = run_module("allstep", "run", *np, *run_module(f"{__package__}.quiet_rank"))
    return start_team(name, command, _NUM_WORKERS, folder, ending)


def _num_steps(team: Team, seconds: float) -> int:
    """Return the steps of a turn: as many as take this long, in whole tens."""
    _train(team, _LEAST_STEPS)
    tens = seconds / (_LEAST_STEPS * _train(team, _LEAST_STEPS))
    return _LEAST_STEPS * max(1, math.ceil(tens))


def _pair(teams: dict[str, Team], num_steps: int, *, is_reversed: bool) -> QuietPair:
    names = [ELASTIC, FIXED] if is_reversed else [FIXED, ELASTIC]
    taken = {name: _train(teams[name], num_steps) for name in names}
    return QuietPair(taken[FIXED], taken[ELASTIC])


def _train(team: Team, num_steps: int) -> float:
    """Return the seconds of a step on the slowest rank."""
    slowest: float = max(answer["seconds"] for answer in team.request({"steps": num_steps}))
    return slowest
