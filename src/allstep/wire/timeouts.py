"""Timeouts that the kernel can count: a wait lasts at most an hour, and a longer one is repeated.

epoll, poll and a socket's timeout count milliseconds in 32 bits, which is 24.8 days. A timeout that
a user sets may be longer ("never"), and must neither raise OverflowError in the waiting thread nor
become a short wait. So each wait ends after an hour, and the loop around it checks the deadline.
"""

import math

HOUR = 3600.0


def bounded(seconds: float) -> float:
    """Return `seconds`, at least 0 and at most an hour."""
    return min(max(0.0, seconds), HOUR)


def checked(seconds: float) -> float:
    """Return `seconds` if it is a finite number, else raise ValueError."""
    if not math.isfinite(seconds):
        raise ValueError(f"a timeout of {seconds} s; expected a finite number of seconds")
    return seconds
