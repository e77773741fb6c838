"""Where each worker's time went.

A step is synchronous: the workers begin and end it together, so a slow one shows as `wait` of the others. What a worker does itself
(`own`: input, compute, update) tells who is slow; what even the slowest one waits is the price of moving gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from allstep.report.series import Clock, Series, steps, whole
from allstep.runlog import Fields, RunRecord

PHASES = ("input", "compute", "wait", "update")
_OWN = ("input", "compute", "update")
_WARMING_UP = 1  # the first line has imports, first allocations and empty queues in it


@dataclass(frozen=True)
class Split:
    """Seconds by phase of every worker."""

    ranks: tuple[Mapping[str, float], ...]

    def share(self, rank: int, phase: str) -> float:
        """Of the worker's time."""
        total = sum(self.ranks[rank].values())
        return self.ranks[rank][phase] / total if total else 0.0

    def own(self, rank: int) -> float:
        """Seconds in which the worker did not wait for others."""
        return sum(self.ranks[rank][phase] for phase in _OWN)

    @property
    def slowest(self) -> int:
        """The rank that has most to do."""
        return max(range(len(self.ranks)), key=self.own)

    @property
    def lateness(self) -> float:
        """Own work of the slowest over the median of the others; 1 when alone."""
        others = [self.own(rank) for rank in range(len(self.ranks)) if rank != self.slowest]
        return self.own(self.slowest) / usual if others and (usual := median(others)) > 0 else 1.0


def split(record: RunRecord) -> Split | None:
    """Over the whole run without its first line; None when the record has no times."""
    lines = timed(record)
    lines = lines[_WARMING_UP:] or lines
    if not lines:
        return None
    size = len(lines[-1]["compute"])
    return Split(tuple({phase: sum(line[phase][rank] for line in lines) for phase in PHASES} for rank in range(size)))


def timed(record: RunRecord) -> list[Fields]:
    """The steps that have the times of all workers; after a resume with another number of them, those since then."""
    lines = [line for line in steps(record) if _is_timed(line)]
    return [line for line in lines if len(line["compute"]) == len(lines[-1]["compute"])]


def own_by_rank(line: Fields) -> list[float]:
    """Seconds of own work of each worker in one step line."""
    return [sum(line[phase][rank] for phase in _OWN) for rank in range(len(line["compute"]))]


def lateness_over_seconds(record: RunRecord) -> Series:
    """Own work of the slowest worker over the mean of all, line by line."""
    clock = Clock(record)
    lines = [
        line for line in whole(timed(record))[_WARMING_UP:] if len(line["compute"]) > 1 and mean(own_by_rank(line)) > 0
    ]
    slow = tuple(max(own_by_rank(line)) / mean(own_by_rank(line)) for line in lines)
    return Series(tuple(clock(line["time"]) for line in lines), slow)


def _is_timed(line: Fields) -> bool:
    lists = [line.get(phase) for phase in PHASES]
    return all(_are_numbers(each) for each in lists) and len({len(each) for each in lists if each}) == 1


def _are_numbers(values: object) -> bool:
    return isinstance(values, Sequence) and bool(values) and all(isinstance(value, int | float) for value in values)
