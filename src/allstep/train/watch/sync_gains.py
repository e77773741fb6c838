"""How much faster other `sync` modes could be, from the times of the workers.

With even shares, c(i) seconds of input and computation and u(i) seconds of update a step, and the
slowest worker at T = max(c + u):

    asynchronous      sum of 1 / (c(i) + u(i)) shares a second, against N / T
    uneven shares     the step takes t with: sum of (t - u(i)) / c(i) = N; gain T / t

Both are limits without any waiting. This module is pure; the run and its report use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from allstep.console.quantities import figure

GAIN = 1.1
"""A gain below it is not worth any staleness."""
ALIKE = 0.05
"""Two gains whose ratio differs from 1 by less are the same."""


@dataclass(frozen=True)
class Gains:
    """How many times the images/s of a synchronous run with even shares are possible."""

    asynchronous: float
    uneven: float

    @property
    def are_alike(self) -> bool:
        """Whether uneven shares gain as much as asynchronous steps."""
        return self.uneven >= self.asynchronous * (1 - ALIKE)

    @property
    def of_uneven(self) -> str:
        """The gain of uneven shares as text, next to that of asynchronous steps."""
        return "the same" if self.are_alike else times(self.uneven)


def times(gain: float) -> str:
    """Return a gain as text."""
    return f"{figure(round(gain, 1))}x"


def gains_of(works: Sequence[float], updates: Sequence[float]) -> Gains | None:
    """Return the possible gains; None without times.

    works: seconds of input and computation of each worker with an even share. updates: seconds of
    its updates.
    """
    if len(works) < 2 or min(works) <= 0:
        return None
    both = list(zip(works, updates, strict=True))
    slowest, number = max(work + update for work, update in both), len(both)
    rate = sum(1 / (work + update) for work, update in both)
    even = (number + sum(update / work for work, update in both)) / sum(1 / work for work in works)
    return Gains(slowest * rate / number, slowest / even)
