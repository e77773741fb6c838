"""The rule of `shares=speed`: which part of the global batch each worker should have.

A step is as slow as its slowest worker. The rule gives samples of slow workers to fast ones until
all need the same time. It is a pure function of the times that all workers have exchanged, so all
of them arrive at the same shares without another message.

```
each step            seconds of input and compute, and samples, of every worker
every 20 steps       t[r]      = median over the last 20 steps of seconds / samples of worker r
                     time[r]   = t[r] x its samples in a whole batch
                     best      = batch / sum of all 1 / t: the time at which all would be equal
                     balanced  if the slowest is at most 2.5% above the best (two workers then
                               differ by 5%), or ahead of the fastest by at most one sample
                     target[r] = (1 / t[r]) / sum of all 1 / t
                     part[r]  += (target[r] - part[r]) / 3, but at most 20% of part[r]
                     weights   = the parts, in samples of a whole batch
```

Medians and small moves keep the shares calm: a pause of the machine changes nothing. Times that
vary by chance must not move them either. So the 2.5% are at least 1.5 standard errors of the
slowest worker's median, and 3 standard errors as long as the shares are at rest: a rest ends when
the difference is certain, and a movement ends when the difference is gone.

The parts are real numbers and continue to move while they are rounded to the same samples. A step
also has a cost that does not depend on its samples; it is part of t, so the target of a worker
moves a little with its share, and still ends where the times are equal.

A worker keeps at least `min_samples`: without samples its speed would be unknown, and a batch norm
needs two.
"""

from collections import deque
from collections.abc import Sequence
from math import nan, pi, sqrt
from statistics import median
from typing import NamedTuple

from allstep.data.order import Weights, even, lengths

EVERY = 20
"""Steps between two decisions, and steps whose median is used."""
_MIN_STEPS = EVERY // 2
# A shorter time of a sample is an error of the clock, and its inverse may be infinite.
_MIN_SECONDS = 1e-12
_FRACTION = 1 / 3
_MAX_MOVE = 0.2
_EXCESS = 0.025
_ERRORS_AT_REST, _ERRORS_MOVING = 3.0, 1.5
# Standard error of the median of n normal values: this factor x their spread / sqrt(n), where the
# spread is the median distance from the median.
_ERROR_OF_MEDIAN = 1.4826 * sqrt(pi / 2)
# A finer split would not be noticeable, and weights must be small numbers.
_MAX_TOTAL = 1 << 20


class SpeedRule:
    """The shares of `size` workers, which begin even.

    `min_samples` is the smallest number of samples of a worker in a whole batch.
    """

    def __init__(self, size: int, min_samples: int = 1) -> None:
        self.weights: Weights = even(size)
        self._min_samples = min_samples
        self._parts = [1 / size] * size
        self._per_sample: deque[list[float]] = deque(maxlen=EVERY)
        self._num_steps = 0
        self._at_rest = True

    def add(self, seconds: Sequence[float], samples: Sequence[float], batch: int) -> Weights | None:
        """Add a step. Return the new weights if they change now.

        `seconds` are those of input and compute by worker, `samples` the samples that each of them
        had; `batch` is the number of samples of a whole global batch.
        """
        pairs = zip(seconds, samples, strict=True)
        self._per_sample.append([each / count if count else nan for each, count in pairs])
        self._num_steps += 1
        if self._num_steps % EVERY or batch < len(self._parts) * self._min_samples:
            return None
        weights = self._decide(batch)
        if weights == self.weights:
            return None
        self.weights = weights
        return weights

    def _decide(self, batch: int) -> Weights:
        paces = [_pace(each) for each in zip(*self._per_sample, strict=True)]
        if not all(pace.seconds > 0 for pace in paces):
            return self.weights
        errors = _ERRORS_AT_REST if self._at_rest else _ERRORS_MOVING
        self._at_rest = _is_balanced(paces, lengths(batch, self.weights), errors)
        if self._at_rest:
            return self.weights
        total = sum(1 / pace.seconds for pace in paces)
        target = [1 / pace.seconds / total for pace in paces]
        self._parts = _at_least(self._min_samples / batch, _moved(self._parts, target))
        return _rounded(self._parts, min(batch, _MAX_TOTAL))


class _Pace(NamedTuple):
    """Seconds of one sample of a worker: the median, and its relative standard error."""

    seconds: float
    error: float


def _pace(per_sample: Sequence[float]) -> _Pace:
    """Return the pace over the steps in which a worker had samples; NaN if they are too few."""
    known = [each for each in per_sample if each == each]
    if len(known) < _MIN_STEPS or not (middle := median(known)) > _MIN_SECONDS:
        return _Pace(nan, nan)
    spread = median(abs(each - middle) for each in known) / middle
    return _Pace(middle, _ERROR_OF_MEDIAN * spread / sqrt(len(known)))


def _is_balanced(paces: Sequence[_Pace], counts: Sequence[int], errors: float) -> bool:
    """Return whether another split would not be faster for certain, or by less than a sample.

    `errors` is the number of standard errors that are certain enough.
    """
    times = [pace.seconds * count for pace, count in zip(paces, counts, strict=True)]
    slow, fast = times.index(max(times)), times.index(min(times))
    best = sum(counts) / sum(1 / pace.seconds for pace in paces)
    noticeable = max(_EXCESS, errors * paces[slow].error)
    by_a_sample = times[slow] - times[fast] <= paces[fast].seconds
    return times[slow] < (1 + noticeable) * best or by_a_sample


def _moved(parts: Sequence[float], target: Sequence[float]) -> list[float]:
    """Return the parts, moved a third of the way, but none by more than 20%."""
    moves = [_FRACTION * (there - here) / here for here, there in zip(parts, target, strict=True)]
    scale = min(1.0, _MAX_MOVE / max(map(abs, moves), default=1.0)) if any(moves) else 1.0
    return [here * (1 + scale * move) for here, move in zip(parts, moves, strict=True)]


def _at_least(low: float, parts: Sequence[float]) -> list[float]:
    """Return the parts with none below `low`; the others give in proportion to what they have."""
    missing = sum(low - each for each in parts if each < low)
    spare = sum(each - low for each in parts if each > low)
    factor = 1 - missing / spare if spare else 1.0
    return [low + max(0.0, each - low) * factor for each in parts]


def _rounded(parts: Sequence[float], total: int) -> Weights:
    """Return the parts as whole numbers with the sum `total`; even ones where they are so."""
    exact = [each * total for each in parts]
    # A part may be a rounding error below a whole number.
    counts = [int(each + 1e-6) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda rank: counts[rank] - exact[rank])
    for rank in by_rest[: total - sum(counts)]:
        counts[rank] += 1
    return even(len(counts)) if max(counts) - min(counts) <= 1 else tuple(counts)
