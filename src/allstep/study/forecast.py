"""How long the rest of a study will take, from what has been measured so far.

A trial says how long it should take (`Trial.seconds`); the pace is how much longer, or shorter,
trials really take:

    pace = seconds from the first line about steps to the last / seconds that this much of the work should have taken

over all trials that have a record, of earlier calls too. So the first steps of the first trials
give a forecast, and every step after makes it better. What a trial takes besides is measured, too:
until its first line about steps, and, when it has ended, after the last. Where trials end before
their time, at a goal or by the study's rule, the others are expected to do as much of theirs as
those did.
"""

import heapq
from collections.abc import Iterable
from statistics import fmean

from allstep.runlog import Fields, RunRecord, number, timed
from allstep.study.trial import Outcome, Trial

_ENOUGH = 5.0
"""Seconds of work that must have been measured before a forecast is made from trials that have not
ended."""


class Forecast:
    """Is told of records, and answers."""

    def __init__(self) -> None:
        self._worked: dict[
            str, tuple[float, float]
        ] = {}  # by trial: seconds, and what they should have been
        self._besides: dict[str, float] = {}
        self._parts: dict[str, float] = {}  # by trial that has ended: how much of its work it did
        self._sure = False

    def learn(self, trial: Trial, record: RunRecord, since: float | None = None) -> None:
        """How far a trial is. since: the time at which we started its process, if we did."""
        record = timed(record)
        seconds, done = measured(trial, record)
        if done > 0:
            self._worked[trial.name] = (seconds, done * trial.seconds)
        if since is not None and len(record.starts) == 1 and record.steps:
            self._besides[trial.name] = max(0.0, record.steps[0]["time"] - since)

    def learn_end(self, trial: Trial, record: RunRecord, wall: float) -> None:
        """How a trial ended, and the seconds from its process's start to its end."""
        self.learn(trial, record)
        self._sure = True
        if len(record.starts) == 1:
            self._besides[trial.name] = max(0.0, wall - measured(trial, record)[0])

    def learn_part(self, outcome: Outcome) -> None:
        """How much of its work a trial did that has ended, at whatever time.

        One that failed says nothing about others.
        """
        part = outcome.trial.fraction(outcome.record)
        if outcome.status != "failed" and part:
            self._parts[outcome.trial.name] = part

    @property
    def pace(self) -> float | None:
        """None as long as too little is known."""
        worked, expected = (
            (sum(each) for each in zip(*self._worked.values(), strict=True))
            if self._worked
            else (0, 0)
        )
        if expected <= 0 or not (self._sure or worked >= _ENOUGH):
            return None
        return worked / expected

    def left(self, trial: Trial, record: RunRecord | None = None) -> float:
        """Seconds until a trial ends that has not begun, or that has this record.

        Only with a pace.
        """
        done = (trial.fraction(record) or 0.0) if record else 0.0
        part = fmean(self._parts.values() or [1.0])
        rest = part - done if done < part else part * (1 - done)
        besides = 0.0 if record else fmean(self._besides.values() or [0.0])
        return (self.pace or 1.0) * trial.seconds * rest + besides


def in_lanes(running: Iterable[float], waiting: Iterable[float], lanes: int) -> float:
    """Seconds until the last ends, when each that waits takes the first lane that is free."""
    free = [0.0] * lanes
    for seconds in [*running, *waiting]:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def measured(trial: Trial, record: RunRecord) -> tuple[float, float]:
    """Seconds of work, and how much of the trial they did.

    From the first line about steps to the last one: before the first lie the start and all that is
    slow only once. A run that was resumed has several such stretches; the time between them does
    not count. A trial that does not say how long it trains counts when it has ended.
    """
    record = timed(record)
    total = trial.num_samples(record)
    if total is None:
        return (_from_start_to_end(record), 1.0) if record.end is not None else (0.0, 0.0)
    stretches = [each for each in _stretches(record) if len(each) > 1]
    seconds = sum(each[-1]["time"] - each[0]["time"] for each in stretches)
    samples = sum(_samples(each[-1]) - _samples(each[0]) for each in stretches)
    return float(seconds), max(0.0, samples / total)


def _samples(line: Fields) -> float:
    return number(line, "samples") or 0.0


def _stretches(record: RunRecord) -> list[list[Fields]]:
    """The lines about steps, from each start to the next."""
    ends = [*(start["time"] for start in record.starts[1:]), float("inf")]
    return [
        [step for step in record.steps if start["time"] <= step["time"] < end]
        for start, end in zip(record.starts, ends, strict=False)
    ]


def _from_start_to_end(record: RunRecord) -> float:
    return float(record.ends[-1]["time"] - record.starts[-1]["time"]) if record.starts else 0.0
