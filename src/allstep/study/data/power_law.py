"""Fit of a power law to errors by number of samples: e(n) = c + a n^-b.

c is the floor that no amount of data gets below, b the slope in log-log. For a given b the law is
linear in c and a, so least squares has a closed form; with c, a >= 0 the minimum is the
unconstrained one, or is on an edge. A grid over b from 0.05 to 1.5 finds the best one, and a search
between its neighbors refines it. Published exponents are 0.07 to 0.35 (Hestness et al. 2017), and a
power law with an offset fits neural networks best in Hoiem et al. 2020.

Every function takes one curve or many at once: errors have the shape (m,) or (draws, m), and the
parameters of a law are then arrays of shape (1,) or (draws,). So an interval from hundreds of
redrawn curves costs about as much as a fit.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXPONENTS = np.linspace(0.05, 1.5, 146)
"""The exponents b that are tried."""
_REFINEMENTS = 40


@dataclass(frozen=True)
class PowerLaw:
    """e(n) = floor + factor n^-exponent: one law, or one per entry of the arrays."""

    floor: Floats
    factor: Floats
    exponent: Floats

    def __call__(self, n: float) -> Floats:
        """Return the error with `n` samples."""
        return self.floor + self.factor * np.power(float(n), -self.exponent)

    def needed(self, error: float) -> Floats:
        """Return the number of samples with this error; infinite where it is at or below c."""
        room = error - self.floor
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            samples = (self.factor / room) ** (1 / self.exponent)
        return np.where(room > 0, samples, np.inf)


class Fitted(NamedTuple):
    """The best laws and their sums of squared distances, in units of the spreads."""

    law: PowerLaw
    chi2: Floats


def fit_power_law(samples: Floats, errors: Floats, spreads: Floats, with_floor: bool) -> Fitted:
    """Return the laws nearest to `errors`, each weighted by 1 / spread^2.

    `samples` and `spreads` have the shape (m,). Without a floor, c is 0.
    """
    curves = np.atleast_2d(errors)
    # Powers of n / typical are near 1, so that the sums below have no large factors.
    typical = float(np.exp(np.log(samples).mean()))
    at = _Exponent(np.log(samples / typical), curves, spreads**-2.0, with_floor)
    chi2 = np.stack([at(np.full(len(curves), b)).chi2 for b in EXPONENTS])
    b = EXPONENTS[chi2.argmin(axis=0)]
    b = _refined(at, b) if len(curves) == 1 else b
    found = at(b)
    law = PowerLaw(found.floor, found.factor * typical**b, b)
    return Fitted(law, found.chi2)


class _Linear(NamedTuple):
    """Floors and factors of the best laws with given exponents."""

    floor: Floats
    factor: Floats
    chi2: Floats


@dataclass(frozen=True)
class _Exponent:
    """Least squares over floor and factor, for one exponent per curve."""

    logs: Floats
    curves: Floats
    weights: Floats
    with_floor: bool

    def __call__(self, b: Floats) -> _Linear:
        powers = np.exp(-b[:, None] * self.logs)
        w = self.weights
        x, xx = powers @ w, (powers * powers) @ w
        e, xe = self.curves @ w, (powers * self.curves) @ w
        edge = self._with(powers, np.zeros_like(b), xe / xx)
        if not self.with_floor:
            return edge
        level = self._with(powers, e / w.sum(), np.zeros_like(b))
        det = w.sum() * xx - x * x
        free = self._with(powers, (xx * e - x * xe) / det, (w.sum() * xe - x * e) / det)
        inside = (free.floor >= 0) & (free.factor >= 0)
        on_edge = _chosen(edge.chi2 <= level.chi2, edge, level)
        return _chosen(inside, free, on_edge)

    def _with(self, powers: Floats, floor: Floats, factor: Floats) -> _Linear:
        distances = self.curves - floor[:, None] - factor[:, None] * powers
        return _Linear(floor, factor, (distances * distances) @ self.weights)


def _chosen(first: NDArray[np.bool_], one: _Linear, other: _Linear) -> _Linear:
    return _Linear(*(np.where(first, a, b) for a, b in zip(one, other, strict=True)))


def _refined(at: _Exponent, b: Floats) -> Floats:
    """Return the best exponent within one step of the grid around `b`, by golden section."""
    step, ratio = EXPONENTS[1] - EXPONENTS[0], (np.sqrt(5) - 1) / 2
    low, high = np.maximum(b - step, EXPONENTS[0]), np.minimum(b + step, EXPONENTS[-1])
    for _ in range(_REFINEMENTS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        smaller = at(left).chi2 <= at(right).chi2
        low, high = np.where(smaller, low, left), np.where(smaller, right, high)
    return np.asarray((low + high) / 2)
