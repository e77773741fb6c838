"""How long the rest of a study will take, from what has been measured so far.

A trial says how long it should take (`Trial.seconds`); the pace is how much longer, or shorter, trials really take:

    pace = seconds worked / seconds that this much of the work should have taken

over all trials that have a record, of earlier calls too. So the first steps of the first trials give a forecast, and every step after
makes it better. What a trial takes besides (the start of its process, mostly) is measured, too.
"""

import heapq
from collections.abc import Iterable
from itertools import pairwise
from statistics import fmean

from allstep.plan.trial import Trial
from allstep.runlog import RunRecord

_ENOUGH = 2.0
"""Seconds of work that must have been measured before a forecast is made from trials that have not ended."""


class Forecast:
    """Is told of records, and answers."""

    def __init__(self) -> None:
        self._worked: dict[str, tuple[float, float]] = {}  # by trial: seconds, and what they should have been
        self._besides: dict[str, float] = {}
        self._sure = False

    def learn(self, trial: Trial, record: RunRecord, since: float | None = None) -> None:
        """How far a trial is. since: the time at which we started its process, if we did."""
        done, worked = trial.fraction(record), seconds_worked(record)
        if done:
            self._worked[trial.name] = (worked, done * trial.seconds)
        if since is not None and record.starts:
            self._besides[trial.name] = max(0.0, record.starts[-1]["time"] - since)

    def learn_end(self, trial: Trial, record: RunRecord, wall: float) -> None:
        """How a trial ended, and the seconds from its process's start to its end."""
        self.learn(trial, record)
        self._sure = True
        if len(record.starts) == 1:
            self._besides[trial.name] = max(0.0, wall - seconds_worked(record))

    @property
    def pace(self) -> float | None:
        """None as long as too little is known."""
        worked, expected = (sum(each) for each in zip(*self._worked.values(), strict=True)) if self._worked else (0, 0)
        if expected <= 0 or not (self._sure or worked >= _ENOUGH):
            return None
        return worked / expected

    def left(self, trial: Trial, record: RunRecord | None = None) -> float:
        """Seconds until a trial ends that has not begun, or that has this record. Only with a pace."""
        done = (trial.fraction(record) or 0.0) if record else 0.0
        return (self.pace or 1.0) * trial.seconds * (1 - done) + (
            0.0 if record else fmean(self._besides.values() or [0.0])
        )


def in_lanes(running: Iterable[float], waiting: Iterable[float], lanes: int) -> float:
    """Seconds until the last ends, when each that waits takes the first lane that is free."""
    free = [0.0] * lanes
    for seconds in [*running, *waiting]:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def seconds_worked(record: RunRecord) -> float:
    """Of a run; the time between a cut and the next start does not count."""
    starts = {line["time"] for line in record.starts}
    every = (record.starts, record.steps, record.evals, record.checkpoints, record.events, record.ends)
    times = sorted(line["time"] for lines in every for line in lines)
    return float(sum(after - before for before, after in pairwise(times) if after not in starts))


def in_words(seconds: float) -> str:
    """As a person would say it: 45 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
