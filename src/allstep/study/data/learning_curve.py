"""What a learning curve means: the error with more data, and how certain that is.

```
Points       errors by number of samples, with the spread of each
refusal      why no law may be fitted: too few sizes, or an error that does not fall
Curve        both laws, with a floor and without, and hundreds of laws of redrawn points
  predict      the error with n samples, with a 90% band
  needed       the number of samples that an error needs, with a 90% range
self_check   the error of the largest size, predicted from the smaller ones
```

**Two laws.** The floor c is often not identifiable: it means nothing until the curve bends. So both
laws are fitted. Where their chi-squared differs by 3.84 or less, the points do not separate them;
then both are shown, a prediction is midway between them, and the band covers both. Otherwise only
the law with the floor counts.

**The band.** All points are redrawn around the measured ones and fitted again, `DRAWS` times; the
band is between the 5% and the 95% quantile. Where the spread is itself an estimate, from a few
seeds, the draws are from Student's t instead of the normal distribution, and where the points are
farther from the best law than their spreads allow, the spreads are widened to match. The draws have
a fixed seed, so the same points give the same band.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from allstep.study.data.power_law import Fitted, Floats, PowerLaw, fit_power_law

MIN_SIZES = 4
"""Fewest sizes of a curve: one more than a law with a floor has parameters."""
DRAWS = 400
SEPARATED = 3.84
"""Difference of chi-squared, one more parameter, that chance exceeds in 1 of 20 cases."""
_FALLS = 5.99
"""The same for two more parameters: a law without floor against a constant has one, and the choice
of the floor another."""
_RISES = 2.5
"""A rise by this many std is not by chance."""
_TAIL = 0.05


@dataclass(frozen=True)
class Points:
    """Errors by number of samples, in rising order of the samples."""

    samples: tuple[float, ...]
    errors: tuple[float, ...]
    spreads: tuple[float, ...]
    """Std of each error."""
    freedom: int = 0
    """Degrees of freedom with which the spreads were estimated; 0: the spreads are known."""

    def first(self, count: int) -> "Points":
        """Return the `count` smallest sizes."""
        kept = (self.samples[:count], self.errors[:count], self.spreads[:count])
        return Points(*kept, self.freedom)

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Return samples, errors and spreads as arrays."""
        n, e, s = (np.asarray(each, float) for each in (self.samples, self.errors, self.spreads))
        return n, e, s


class Range(NamedTuple):
    """A value with its 90% range; `by_law` has the values of the laws that are shown."""

    value: float
    low: float
    high: float
    by_law: tuple[float, ...]


def refusal(points: Points) -> str:
    """Return why no law may be fitted to the points; "" if one may."""
    n, e, s = points.arrays()
    if len(n) < MIN_SIZES:
        return f"a curve needs at least {MIN_SIZES} sizes with a result, found {len(n)}"
    lowest = int(e[:-1].argmin())
    if e[-1] - e[lowest] > _RISES * math.hypot(s[-1], s[lowest]):
        return (
            f"the error rises, from {e[lowest]:.2%} with {n[lowest]:,.0f} samples to {e[-1]:.2%}"
            f" with {n[-1]:,.0f}"
        )
    level = float((e / s**2).sum() / (1 / s**2).sum())
    gain = float((((e - level) / s) ** 2).sum()) - fit_power_law(n, e, s, True).chi2[0]
    if gain <= _FALLS or e[-1] >= e[0]:
        return (
            f"the error does not fall by more than its spread: {e[0]:.2%} with {n[0]:,.0f} samples,"
            f" {e[-1]:.2%} with {n[-1]:,.0f}"
        )
    return ""


@dataclass(frozen=True)
class Curve:
    """The laws of points that `refusal` has nothing against."""

    points: Points

    @cached_property
    def with_floor(self) -> Fitted:
        """The law e(n) = c + a n^-b."""
        return fit_power_law(*self.points.arrays(), True)

    @cached_property
    def without_floor(self) -> Fitted:
        """The law e(n) = a n^-b."""
        return fit_power_law(*self.points.arrays(), False)

    @property
    def gain(self) -> float:
        """How much smaller chi-squared is with the floor."""
        return float(self.without_floor.chi2[0] - self.with_floor.chi2[0])

    @property
    def is_separated(self) -> bool:
        """Whether the points need a floor; else both laws are shown."""
        return self.gain > SEPARATED

    @property
    def laws(self) -> list[PowerLaw]:
        """The laws that are shown: with floor, then without unless the points exclude it."""
        return [self.with_floor.law, *([] if self.is_separated else [self.without_floor.law])]

    @cached_property
    def _redrawn(self) -> list[PowerLaw]:
        """The laws of redrawn points, one entry per law that is shown, each with many laws."""
        n, e, s = self.points.arrays()
        kinds = [True] if self.is_separated else [True, False]
        draws = e + self._widening * s * _noise(len(n), self.points.freedom)
        return [fit_power_law(n, draws, s, kind).law for kind in kinds]

    @property
    def _widening(self) -> float:
        """By how much the points are farther from the law than estimated spreads allow."""
        free = len(self.points.samples) - 3
        if not self.points.freedom or free < 1:
            return 1.0
        return max(1.0, math.sqrt(float(self.with_floor.chi2[0]) / free))

    def predict(self, n: float) -> Range:
        """Return the error with `n` samples."""
        return self._range(lambda law: law(n))

    @property
    def floor(self) -> Range:
        """The floor of the law that has one."""
        found, draws = self.with_floor.law.floor, self._redrawn[0].floor
        low, high = _quantiles(draws)
        return Range(float(found[0]), low, high, (float(found[0]),))

    def needed(self, error: float) -> Range:
        """Return the number of samples that `error` needs; infinite if no amount is enough.

        Between two laws it is the geometric mean, because they are multiples of the data.
        """
        found = self._range(lambda law: law.needed(error))
        return found._replace(value=math.prod(found.by_law) ** (1 / len(found.by_law)))

    def _range(self, of: Callable[[PowerLaw], Floats]) -> Range:
        values = tuple(float(of(law)[0]) for law in self.laws)
        ends = [_quantiles(of(draws)) for draws in self._redrawn]
        low, high = min(low for low, _ in ends), max(high for _, high in ends)
        return Range(sum(values) / len(values), low, high, values)


def _noise(count: int, freedom: int) -> Floats:
    draws, shape = np.random.default_rng(0), (DRAWS, count)
    return draws.standard_t(freedom, shape) if freedom else draws.standard_normal(shape)


def _quantiles(values: Floats) -> tuple[float, float]:
    """Return both ends of the 90% range; values may be infinite, so none is interpolated."""
    ordered = np.sort(values)
    skipped = round(_TAIL * (len(ordered) - 1))
    return float(ordered[skipped]), float(ordered[-1 - skipped])


class Check(NamedTuple):
    """The error of the largest size, predicted from the sizes up to `up_to`."""

    up_to: float
    predicted: Range
    measured: float

    @property
    def off(self) -> float:
        """Distance of the prediction, relative to the measured error; NaN if that is 0."""
        return self.predicted.value / self.measured - 1 if self.measured else math.nan

    @property
    def is_inside(self) -> bool:
        """Whether the measured error is in the band."""
        return self.predicted.low <= self.measured <= self.predicted.high


def self_check(points: Points) -> list[Check]:
    """Return predictions of the largest size, first from all others, then from ever fewer.

    Sizes that no law may be fitted to give no prediction.
    """
    return list(_checks(points))


def _checks(points: Points) -> Iterator[Check]:
    for count in range(len(points.samples) - 1, MIN_SIZES - 1, -1):
        fewer = points.first(count)
        if not refusal(fewer):
            predicted = Curve(fewer).predict(points.samples[-1])
            yield Check(fewer.samples[-1], predicted, points.errors[-1])


def pooled_spreads(
    errors: Sequence[Sequence[float]], num_evaluated: int
) -> tuple[tuple[float, ...], int]:
    """Return the spread of the mean error of each size, and its degrees of freedom.

    `errors` has the errors of the seeds by size, each on `num_evaluated` samples. The spread has
    two sources: the draw of the validation samples (binomial, and the same for all seeds), and the
    seed. That of the seed is estimated relative to the error, over all sizes together, because a
    size has few seeds. Without a second seed it is unknown; then the distances from the law
    take its place, with as many degrees of freedom as there are sizes beyond three.
    """
    several = [np.log(np.maximum(each, _least(num_evaluated))) for each in errors if len(each) > 1]
    freedom = sum(len(each) - 1 for each in several)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in several)
    by_seed = squares / freedom if freedom else 0.0
    means = [max(float(np.mean(each)), _least(num_evaluated)) for each in errors]
    spreads = [
        math.sqrt(mean * (1 - mean) / num_evaluated + by_seed * mean**2 / len(each))
        for mean, each in zip(means, errors, strict=True)
    ]
    # An error of 100% has no binomial spread, and a weight must be finite.
    least = _least(num_evaluated)
    return tuple(max(each, least) for each in spreads), max(1, freedom, len(errors) - 3)


def _least(num_evaluated: int) -> float:
    """Return the error of half a wrong sample: where all are right, the error is unknown below."""
    return 0.5 / num_evaluated
