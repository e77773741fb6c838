"""Learning-rate schedules: pure functions of the samples seen.

Samples, not steps: a run with another batch or another number of workers has the same rate at the same point of its data, and a
resumed run needs no state. A factor from 0 to 1 is multiplied on the peak rate:

    lr = peak * warm_up(seen, warmup) * SCHEDULES["cosine"](seen - warmup, total - warmup)

`seen` counts the samples before the step.
"""

import math
from collections.abc import Callable, Mapping

Schedule = Callable[[float, float], float]


def warm_up(seen: float, warmup: float) -> float:
    """Rises in a straight line from 0 to 1 over the first `warmup` samples (Goyal et al. 2017, https://arxiv.org/abs/1706.02677)."""
    return min(1.0, seen / warmup) if warmup > 0 else 1.0


def constant(seen: float, total: float) -> float:
    """Stays at 1."""
    return 1.0


def cosine(seen: float, total: float) -> float:
    """Falls from 1 to 0 along half a cosine (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983)."""
    return 0.5 * (1.0 + math.cos(math.pi * _done(seen, total)))


def linear(seen: float, total: float) -> float:
    """Falls from 1 to 0 in a straight line."""
    return 1.0 - _done(seen, total)


SCHEDULES: Mapping[str, Schedule] = {"constant": constant, "cosine": cosine, "linear": linear}


def _done(seen: float, total: float) -> float:
    """The part of `total` that is over; nothing is before the start, even of a total that is all warm-up."""
    if seen <= 0:
        return 0.0
    return min(1.0, seen / total) if total > 0 else 1.0
