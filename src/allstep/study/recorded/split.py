"""The time of each worker, split into phases.

A step is synchronous: the workers start and end it together, so a slow one shows as `wait` of the
others. A worker's own work (`own`: input, compute, update) shows which one is slow; the time that
even the slowest one waits is the cost of moving gradients.

    times[line, phase, rank]     seconds, phases in the order of PHASES

This is one array for all lines of a world, because a long run has millions of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.runlog import LARGEST, Fields, RunRecord
from allstep.study.recorded.series import Clock, Series, steps, whole
from allstep.study.recorded.worlds import longest, worlds

PHASES = ("input", "compute", "wait", "update")
_OWN = (0, 1, 3)
# the first line includes imports, first allocations and empty queues
_WARMING_UP = 1

INPUT_SHARE = 0.15
"""Fraction of a worker's time from which waiting for input is a problem."""
LATENESS, LATE_OFTEN = 1.15, 0.6
"""Own work of the slowest by the median of the others, and the fraction of lines it is slowest."""
WAIT_SHARE = 0.25
"""Fraction of every worker's time from which waiting for gradients is reported."""

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Seconds by phase of every worker."""

    ranks: tuple[Mapping[str, float], ...]

    def share(self, rank: int, phase: str) -> float:
        """Return the fraction of the worker's time that it spent in `phase`."""
        total = sum(self.ranks[rank].values())
        return self.ranks[rank][phase] / total if total else 0.0

    def own(self, rank: int) -> float:
        """Return the seconds in which the worker did not wait for others."""
        return sum(self.ranks[rank][PHASES[phase]] for phase in _OWN)

    @property
    def hungriest(self) -> int:
        """The rank that waits for input for the largest part of its time."""
        return max(range(len(self.ranks)), key=lambda rank: self.share(rank, "input"))

    @property
    def least_wait(self) -> float:
        """Fraction of its time that the busiest worker waits for others and for gradients."""
        return min(self.share(rank, "wait") for rank in range(len(self.ranks)))

    @property
    def slowest(self) -> int:
        """The rank with the most own work."""
        return max(range(len(self.ranks)), key=self.own)

    @property
    def lateness(self) -> float:
        """Own work of the slowest rank divided by the median of the others; 1 for a single rank."""
        others = [self.own(rank) for rank in range(len(self.ranks)) if rank != self.slowest]
        return self.own(self.slowest) / usual if others and (usual := median(others)) > 0 else 1.0


def split(record: RunRecord) -> Split | None:
    """Return the split of the longest world without its first line; None if there are no times."""
    _, times = timed(longest(record).lines)
    if not len(times):
        return None
    sums = (times[_WARMING_UP:] if len(times) > _WARMING_UP else times).sum(axis=0)
    return Split(tuple(dict(zip(PHASES, rank.tolist(), strict=True)) for rank in sums.T))


@dataclass(frozen=True)
class LateWorker:
    """A worker that holds up the others: the slowest one by far, and most of the time."""

    rank: int
    often: float
    """Fraction of the lines in which it is the slowest."""
    lines: int
    """Number of lines of its world."""


def late_worker(record: RunRecord) -> LateWorker | None:
    """Return the worker that holds up the others; None if there is none."""
    found = split(record)
    if found is None or found.lateness < LATENESS:
        return None
    slowest = slowest_by_line(record)
    often = slowest.count(found.slowest) / len(slowest)
    return LateWorker(found.slowest, often, len(slowest)) if often >= LATE_OFTEN else None


def slowest_by_line(record: RunRecord) -> list[int]:
    """Return the rank with the most own work in each line of the longest world."""
    _, times = timed(longest(record).lines)
    found: list[int] = _own(times).argmax(axis=1).tolist() if len(times) else []
    return found


def lateness_over_seconds(record: RunRecord) -> Series:
    """Return the slowest worker's own work divided by the mean, by line of each world.

    A world of one worker has no points.
    """
    clock, points = Clock(record), list[tuple[float, float]]()
    usual = {id(line) for line in whole(steps(record))}
    for world in worlds(record):
        lines, times = timed([line for line in world.lines if id(line) in usual])
        own = _own(times[_WARMING_UP:])
        if own.shape[1] >= 2 and np.all(own.sum(axis=1) > 0):
            late: list[float] = (own.max(axis=1) / own.mean(axis=1)).tolist()
            at = [clock(line["time"]) for line in lines[_WARMING_UP:]]
            points += zip(at, late, strict=True)
    return Series(tuple(x for x, _ in points), tuple(y for _, y in points))


def timed(lines: Sequence[Fields]) -> tuple[list[Fields], Times]:
    """Return the lines of a world that have the times of all workers, and these times.

    If the number of workers differs among the lines, only those with the last number count.
    """
    sizes = [_num_ranks(line) for line in lines]
    size = next((each for each in reversed(sizes) if each), 0)
    chosen = [line for line, each in zip(lines, sizes, strict=True) if each == size and size]
    try:
        times = np.array([[line[phase] for phase in PHASES] for line in chosen], dtype=np.float64)
    except (TypeError, ValueError):
        # a value is not a number
        chosen, times = [], np.empty(0)
    times = times.reshape(len(chosen), len(PHASES), size if chosen else 0)
    good = [i for i, each in enumerate(times) if np.all(np.abs(each) < LARGEST)]
    return [chosen[i] for i in good], times[good]


def _own(times: Times) -> Times:
    own: Times = times[:, _OWN].sum(axis=1)
    return own


def _num_ranks(line: Fields) -> int:
    """Return the number of workers whose times a line has; 0 if the phases differ in it."""
    lists: list[Any] = [line.get(phase) for phase in PHASES]
    if not all(isinstance(each, list) for each in lists):
        return 0
    return len(lists[0]) if len({len(each) for each in lists}) == 1 else 0
