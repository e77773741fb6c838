"""The table of `allstep plan --published`: predicted against published, with the errors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from allstep.console.quantities import count
from allstep.plan.levels import ERRORS, LEVELS, NAMES, constant_efficiency, predict
from allstep.plan.published_runs import PublishedRun

GUESS = "same efficiency"
"""Name of the guess that the efficiency of the smallest run on several hosts stays."""


@dataclass(frozen=True)
class Point:
    """A published speed with the predictions of it: relative errors by level, or by `GUESS`."""

    run: PublishedRun
    hosts: int
    published: float
    errors: dict[int | str, float]
    is_fit: bool

    @property
    def workers(self) -> int:
        """Workers of all hosts."""
        return self.hosts * self.run.workers_per_host

    @property
    def efficiency(self) -> float:
        """Speed relative to as many times one worker."""
        return self.published / (self.workers * self.run.alone)


@dataclass(frozen=True)
class Errors:
    """The errors of one kind of prediction over several points."""

    name: str
    number: int
    median: float
    within_tenth: int
    worst: float


def points_of(runs: Sequence[PublishedRun]) -> list[Point]:
    """Return the points of all series with the errors of all predictions that can be made."""
    return [point for run in runs for point in _points_of(run)]


def _points_of(run: PublishedRun) -> Iterator[Point]:
    predictions: dict[int | str, dict[int, float]] = {
        level: predict(run, level) for level in LEVELS
    }
    predictions[GUESS] = constant_efficiency(run)
    for hosts, published in run.points.items():
        errors = {
            kind: found[hosts] / published - 1
            for kind, found in predictions.items()
            if hosts in found
        }
        is_fit = run.extrapolates and hosts == min(run.points)
        yield Point(run, hosts, published, errors, is_fit)


def summary(points: Sequence[Point]) -> list[Errors]:
    """Return the errors by kind of prediction, allreduce and servers apart where both occur."""
    rows = []
    for kind in (*LEVELS, GUESS):
        name = f"{kind}: {NAMES[kind]}" if isinstance(kind, int) else kind
        groups = {"": points}
        if kind == 1:
            groups = {
                ", allreduce": [each for each in points if each.run.policy.servers is None],
                ", servers": [each for each in points if each.run.policy.servers is not None],
            }
        for group, members in groups.items():
            errors = [abs(each.errors[kind]) for each in members if kind in each.errors]
            if errors:
                within = sum(each <= 0.1 for each in errors)
                rows.append(Errors(name + group, len(errors), median(errors), within, max(errors)))
    return rows


HEAD = ("series", "hosts", "workers", "samples/s", "eff.", "L0", "L1", "L2", "L3", GUESS)
SUMMARY_HEAD = ("what is known", "points", "median error", "within 10%", "worst")


def rows_of(points: Sequence[Point]) -> list[list[str]]:
    """Return the cells of the table, one row for each point."""
    return [
        [
            each.run.name,
            str(each.hosts),
            str(each.workers),
            count(each.published),
            f"{each.efficiency:.0%}",
            *(_cell(each, kind) for kind in (*LEVELS, GUESS)),
        ]
        for each in points
    ]


def summary_rows(points: Sequence[Point]) -> list[list[str]]:
    """Return the cells of the table of errors."""
    return [
        [
            each.name,
            str(each.number),
            f"{each.median:.1%}",
            str(each.within_tenth),
            f"{each.worst:.0%}",
        ]
        for each in summary(points)
    ]


def expectations() -> list[str]:
    """Return a line for each level: what is known, and the error to expect."""
    return [f"L{level}: {NAMES[level]}; error: {ERRORS[level]}" for level in LEVELS]


def _cell(point: Point, kind: int | str) -> str:
    if kind in point.errors:
        return f"{point.errors[kind]:+.1%}"
    return "fit" if point.is_fit and kind in (3, GUESS) else ""
