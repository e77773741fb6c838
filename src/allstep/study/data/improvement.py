"""Whether runs still improved when they ended: too few updates look like a floor.

A large training split needs more updates than a small one. If its runs end too early, the curve
bends where the updates end, and not where the data does.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from allstep.runlog import RunRecord, number
from allstep.study.results import validations

_EARLIER = 0.8
"""Fraction of the run at which the earlier error is taken."""
_MIN_EVALUATIONS = 4
_BY_CHANCE = 2.0
"""An improvement by more than this many std is not by chance."""


class Improvement(NamedTuple):
    """Mean validation error of some runs at 80% of their samples, and at the end."""

    before: float
    after: float
    spread: float
    """Std of the difference."""

    @property
    def is_real(self) -> bool:
        """Whether the runs still improved by more than chance explains."""
        return self.before - self.after > _BY_CHANCE * self.spread


def improvement(records: Sequence[RunRecord]) -> Improvement | None:
    """Return the improvement in the last fifth of the runs; None with too few evaluations.

    Both errors are of the same validation samples: as a difference has at most as many samples that
    changed as there were errors, its spread is at most about that of an error.
    """
    pairs = [pair for record in records if (pair := _pair(record)) is not None]
    if not pairs:
        return None
    before, after = (fmean(each) for each in list(zip(*pairs, strict=True))[:2])
    spread = math.sqrt(max(after, 0.0) / pairs[0][2] / len(pairs))
    return Improvement(before, after, spread)


def _pair(record: RunRecord) -> tuple[float, float, int] | None:
    """Return the errors at 80% and at the end, and the number of validation samples."""
    lines = validations(record)
    if len(lines) < _MIN_EVALUATIONS:
        return None
    last = lines[-1]
    earlier = [line for line in lines if line["samples"] <= _EARLIER * last["samples"]]
    if not earlier:
        return None
    count = int(number(last, "count") or 0)
    return (1 - earlier[-1]["accuracy"], 1 - last["accuracy"], count) if count > 0 else None
