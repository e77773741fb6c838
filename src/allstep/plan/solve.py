"""Where a function that only falls has a given value."""

import math
from collections.abc import Callable

SLOWEST_LINK = 1e5
"""Lowest rate of a link that a fit tries, in bytes/s."""

_STEPS = 60


def falling_to(falling: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Return where a function that falls has the value `wanted`, by bisection of the logarithm.

    The answer is between `low` and `high`, and is one of them if the value is not reached.
    """
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return math.sqrt(low * high)
