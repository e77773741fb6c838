"""Forecast of the remaining time of a study, from the run records so far.

Each trial has an expected duration (`Trial.seconds`). The pace is the ratio of measured to expected
time:

    pace = seconds from the first step line to the last / expected seconds of that share of the work

summed over all trials that have a record, those of earlier calls included. So the first steps of
the first trials give a forecast, and later steps improve it. The overhead of a trial is measured
too: the time before its first step line and, once it has ended, the time after the last one. If
trials end early, at a goal or by the study's rule, the others are expected to do the same share of
their work on average.
"""

import heapq
from collections.abc import Iterable
from statistics import fmean

from allstep.runlog import Fields, RunRecord, number, timed
from allstep.study.trial import Outcome, Trial

_ENOUGH = 5.0
"""Seconds of measured work that a forecast needs while no trial of this call has ended."""


class Forecast:
    """Estimates remaining seconds from the run records that it is given."""

    def __init__(self) -> None:
        # by trial: measured and expected seconds
        self._worked: dict[str, tuple[float, float]] = {}
        # by trial: seconds outside the training steps
        self._overhead: dict[str, float] = {}
        # by trial that has ended: the share of its work that it did
        self._shares: dict[str, float] = {}
        self._sure = False

    def learn(self, trial: Trial, record: RunRecord, since: float | None = None) -> None:
        """Use the record of a trial; `since` is the time at which this call started its process."""
        record = timed(record)
        seconds, done = measured(trial, record)
        if done > 0:
            self._worked[trial.name] = (seconds, done * trial.seconds)
        if since is not None and len(record.starts) == 1 and record.steps:
            self._overhead[trial.name] = max(0.0, record.steps[0]["time"] - since)

    def learn_end(self, trial: Trial, record: RunRecord, wall: float) -> None:
        """Use the record of an ended trial whose process ran for `wall` seconds."""
        self.learn(trial, record)
        self._sure = True
        if len(record.starts) == 1:
            self._overhead[trial.name] = max(0.0, wall - measured(trial, record)[0])

    def learn_part(self, outcome: Outcome) -> None:
        """Use the share of its work that a trial did before it ended, in this or an earlier call.

        Failed trials are ignored: they do not predict the others.
        """
        part = outcome.trial.fraction(outcome.record)
        if outcome.status != "failed" and part:
            self._shares[outcome.trial.name] = part

    @property
    def pace(self) -> float | None:
        """Measured seconds per expected second; None while too little has been measured."""
        worked, expected = (
            (sum(each) for each in zip(*self._worked.values(), strict=True))
            if self._worked
            else (0, 0)
        )
        if expected <= 0 or not (self._sure or worked >= _ENOUGH):
            return None
        return worked / expected

    def left(self, trial: Trial, record: RunRecord | None = None) -> float:
        """Return the seconds until a trial ends: a new one, or a running one with this `record`.

        The result is meaningful only if `pace` is not None.
        """
        done = (trial.fraction(record) or 0.0) if record else 0.0
        part = fmean(self._shares.values() or [1.0])
        rest = part - done if done < part else part * (1 - done)
        overhead = 0.0 if record else fmean(self._overhead.values() or [0.0])
        return (self.pace or 1.0) * trial.seconds * rest + overhead


def in_lanes(running: Iterable[float], waiting: Iterable[float], lanes: int) -> float:
    """Return the seconds until the last trial ends if each waiting one takes the first free lane.

    `running` and `waiting` have the remaining seconds of each trial.
    """
    free = [0.0] * lanes
    for seconds in [*running, *waiting]:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def measured(trial: Trial, record: RunRecord) -> tuple[float, float]:
    """Return the seconds of training so far and the share of the trial that they did.

    The time counts from the first step line to the last: the start and one-off set-up come before
    the first. A resumed run has several such stretches; the time between them does not count. A
    trial without a known number of samples counts only once it has ended.
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
    """Return the step lines of the record, grouped by the start that precedes them."""
    ends = [*(start["time"] for start in record.starts[1:]), float("inf")]
    return [
        [step for step in record.steps if start["time"] <= step["time"] < end]
        for start, end in zip(record.starts, ends, strict=False)
    ]


def _from_start_to_end(record: RunRecord) -> float:
    return float(record.ends[-1]["time"] - record.starts[-1]["time"]) if record.starts else 0.0
