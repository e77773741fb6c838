"""Search for the best learning rate when each try costs a run.

The search goes up and down from a first learning rate by a factor, until both neighbors of the best
one are worse:

    lr = first * FACTOR ** k

A score is what the run cost (updates to the goal: lower is better), infinite where the goal was not
reached.
"""

import math
from collections.abc import Mapping

FACTOR = 2.0


def next_step(scores: Mapping[int, float], most: int, too_high: int | None = None) -> int | None:
    """Return the k to try next; None if the best is found, or `most` of them have been tried.

    `scores` has the score of each k tried so far. `too_high` is the lowest k whose run diverged;
    neither it nor a larger k is tried again.
    """
    if not scores:
        return 0
    if len(scores) >= most:
        return None
    best = min(scores, key=lambda k: (scores[k], -k))
    around = (best + 1, best - 1) if math.isfinite(scores[best]) else _outwards(most)
    return next((k for k in around if k not in scores and (too_high is None or k < too_high)), None)


def _outwards(most: int) -> list[int]:
    """Return 1, -1, 2, -2, ...: without a success the direction to search is unknown."""
    return [sign * k for k in range(1, most + 1) for sign in (1, -1)]


def rate(first: float, k: int) -> float:
    """Return the k-th learning rate, rounded to three digits to be easy to read and type."""
    return float(f"{first * FACTOR**k:.3g}")
