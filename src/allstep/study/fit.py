"""Fit of the updates to a goal by batch: S(B) = Smin + Emin / B.

Smin is the fewest updates that any batch needs, Emin the fewest samples; at B = Emin / Smin, the
critical batch, a run needs twice the minimum of both (McCandlish et al. 2018, equation 2.11). Small
batches need Emin / B updates (twice the batch, half the updates); large ones need Smin, and larger
batches no longer help.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """The fitted curve S(B) and the distance of the points from it."""

    fewest_updates: float
    """Smin: the limit of updates for large batches."""
    fewest_samples: float
    """Emin: the limit of samples for small batches."""
    rms: float
    """Root mean square of the distances relative to S."""

    def __call__(self, batch: float) -> float:
        return self.fewest_updates + self.fewest_samples / batch

    @property
    def critical_batch(self) -> float:
        """The batch at which both terms are equal; infinite if Smin is 0."""
        return (
            self.fewest_samples / self.fewest_updates if self.fewest_updates > 0 else float("inf")
        )


def fit(batches: Sequence[float], updates: Sequence[float]) -> Fit | None:
    """Fit `updates` by `batches` with both terms >= 0; None with fewer than 3 different batches.

    Two batches determine both terms, so that the fit would mean nothing. Updates range over orders
    of magnitude and their noise is proportional to them, so the fit minimizes the squares of the
    relative distances: |A x - 1|^2 where A has the rows (1, 1/B) / S. With two unknowns the minimum
    under x >= 0 is the unconstrained one, or is on an edge.
    """
    if len(set(batches)) < 3:
        return None
    b, s = np.asarray(batches, float), np.asarray(updates, float)
    rows = np.stack([1 / s, 1 / (b * s)], axis=1)
    # 1/S and 1/(B S) differ by orders of magnitude
    scale = np.linalg.norm(rows, axis=0)
    best = min(_candidates(rows / scale), key=lambda x: _squared(rows / scale, x)) / scale
    rms = float(np.sqrt(_squared(rows, best) / len(s)))
    return Fit(float(best[0]), float(best[1]), rms)


def _candidates(rows: np.ndarray) -> list[np.ndarray]:
    free = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    edges = [
        np.eye(2)[i] * max(0.0, rows[:, i].sum() / (rows[:, i] @ rows[:, i])) for i in range(2)
    ]
    return [free, *edges] if (free >= 0).all() else edges


def _squared(rows: np.ndarray, x: np.ndarray) -> float:
    return float(((rows @ x - 1) ** 2).sum())
