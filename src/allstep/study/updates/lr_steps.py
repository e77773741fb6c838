"""Which rate to try next, when each try costs a run: up and down from a first one by a factor,
until both neighbours of the best are worse.

    rate = first * FACTOR ** k

A score is what the run cost (updates to the goal: lower is better), infinite where the goal was not
reached.
"""

import math
from collections.abc import Mapping

FACTOR = 2.0


def next_step(scores: Mapping[int, float], most: int, too_high: int | None = None) -> int | None:
    """The k to try next, given the scores by k; None when it is found, or `most` have been tried.

    too_high: the lowest k whose run diverged; nothing is tried from there on.
    """
    if not scores:
        return 0
    if len(scores) >= most:
        return None
    best = min(scores, key=lambda k: (scores[k], -k))
    around = (best + 1, best - 1) if math.isfinite(scores[best]) else _outwards(most)
    return next((k for k in around if k not in scores and (too_high is None or k < too_high)), None)


def _outwards(most: int) -> list[int]:
    """Without any success one cannot know the direction: too slow and too fast may look alike."""
    return [sign * k for k in range(1, most + 1) for sign in (1, -1)]


def rate(first: float, k: int) -> float:
    """To three digits, so that it can be read and said again."""
    return float(f"{first * FACTOR**k:.3g}")
