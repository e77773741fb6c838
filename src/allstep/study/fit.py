"""Updates to a goal against the batch: S(B) = Smin + Emin / B.

Smin is the fewest updates that any batch needs, Emin the fewest samples; at B = Emin / Smin, the
critical batch, both are twice their least (McCandlish et al. 2018, equation 2.11). Small batches
need Emin / B updates (twice the batch, half the updates), large ones Smin, and more samples no
longer help.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """The curve and how far the points are from it."""

    fewest_updates: float
    """Smin."""
    fewest_samples: float
    """Emin."""
    rms: float
    """Root of the mean squared distance, as a part of S."""

    def __call__(self, batch: float) -> float:
        return self.fewest_updates + self.fewest_samples / batch

    @property
    def critical_batch(self) -> float:
        """Where both terms are equal; infinite where no batch so far was too large."""
        return (
            self.fewest_samples / self.fewest_updates if self.fewest_updates > 0 else float("inf")
        )


def fit(batches: Sequence[float], updates: Sequence[float]) -> Fit | None:
    """Least squares of the relative distances, neither term below 0; None with fewer than 3
    batches, which any such curve fits.

    Updates range over orders of magnitude and scatter by a part of themselves, so distances count
    as parts: minimise |A x - 1|^2 with A's rows (1, 1/B) / S. With two unknowns the minimum under x
    >= 0 is the free one, or lies on an edge.
    """
    if len(set(batches)) < 3:
        return None
    b, s = np.asarray(batches, float), np.asarray(updates, float)
    rows = np.stack([1 / s, 1 / (b * s)], axis=1)
    scale = np.linalg.norm(rows, axis=0)  # 1/S and 1/(B S) differ by orders of magnitude
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
