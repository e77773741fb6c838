"""A calibration: what was measured of a model on a machine, and the profile that follows from it.

```
steps      one worker alone, at two or more batch sizes: forward, ready times, update, input
host       all workers of a host at once: independent, then together; an allreduce at some sizes
hosts      the same over several hosts, with the link between them
facts      of what and on which machine: model, batch, precision, cores
```

A profile at another batch is read off the line through the two nearest sizes, t(b) = t0 + b tau.
The fixed part t0 is what makes small shares slow, so one size is not enough: with one, t0 is taken
as 0, and small shares come out too fast.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from allstep.costs.speed import Speed
from allstep.plan.setting import Gradient, Profile

Sums = tuple[tuple[float, float], ...]
"""Measured allreduces: bytes and seconds of each."""


@dataclass(frozen=True)
class StepTimes:
    """A step of one worker with `batch` samples: medians of several, in seconds."""

    batch: int
    forward: float
    backward: float
    ready: tuple[float, ...]
    """When each gradient is complete, from the start of the step; gradients in forward order."""
    update: float
    input: float = 0.0
    """Seconds in which the input pipeline provides a batch."""
    jitter: float = 0.0
    """Std of forward and backward, relative to the mean."""

    @property
    def compute(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def busy(self) -> float:
        """Forward, backward and update."""
        return self.compute + self.update


@dataclass(frozen=True)
class HostTimes:
    """All `workers` workers of one host at once, each with the same number of samples."""

    workers: int
    independent: StepTimes
    """Mean over the workers, each with a model of its own."""
    by_rank: tuple[float, ...] = ()
    """Forward and backward of each worker while they are independent."""
    sums: Sums = ()
    together: float | None = None
    """Seconds of a step in which they train one model; None: not measured."""


@dataclass(frozen=True)
class HostsTimes:
    """Workers of several hosts at once, each with `batch` samples."""

    hosts: int
    per_host: int
    link: Speed
    batch: int
    sums: Sums = ()
    together: float | None = None

    @property
    def size(self) -> int:
        """Workers of all hosts."""
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Calibration:
    """All measurements, with the facts of what was measured."""

    nbytes: tuple[float, ...]
    """Bytes of each gradient, in forward order."""
    steps: tuple[StepTimes, ...]
    """One worker alone, in rising order of the batch."""
    num_train: int
    """Samples of an epoch."""
    host: HostTimes | None = None
    hosts: HostsTimes | None = None
    shares_weights: bool = False
    """Whether the workers of one host share one copy of the weights."""
    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def jitter(self) -> float:
        """Std of a worker's step, relative to its mean."""
        return fmean(each.jitter for each in self.steps)

    @property
    def largest_batch(self) -> int:
        """The largest number of samples that a worker was measured with."""
        return max(each.batch for each in self.steps)


def profile_at(calibration: Calibration, batch: float) -> Profile:
    """Return the profile of one worker alone with `batch` samples, measured or not."""

    def at(value: Callable[[StepTimes], float]) -> float:
        return on_line([(each.batch, value(each)) for each in calibration.steps], batch)

    forward, backward = at(lambda each: each.forward), at(lambda each: each.backward)
    end = forward + backward
    ready = [at(_ready(place)) for place in range(len(calibration.nbytes))]
    gradients = tuple(
        Gradient(nbytes, min(end, each), _needed(each, forward, backward))
        for nbytes, each in zip(calibration.nbytes, ready, strict=True)
    )
    # The update has the same work with any number of samples.
    update = fmean(each.update for each in calibration.steps)
    return Profile(forward, backward, gradients, update, at(lambda each: each.input))


def fixed_part(calibration: Calibration) -> float:
    """Return t0: the seconds of forward and backward that do not depend on the batch."""
    return on_line([(each.batch, each.compute) for each in calibration.steps], 0.0)


def per_sample(calibration: Calibration) -> float:
    """Return tau: the seconds of forward and backward that each further sample takes."""
    largest = calibration.largest_batch
    points = [(each.batch, each.compute) for each in calibration.steps]
    return max(1e-12, (on_line(points, largest) - on_line(points, 0.0)) / largest)


def on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at `x` of the line through the two points next to it.

    Times neither fall with more samples nor get below zero, whatever the noise of the points: below
    the smallest point they are at most in proportion, above the largest at least its value. One
    point gives a line through zero.
    """
    if len(points) == 1:
        (only, value) = points[0]
        return value * x / only
    index = next((i for i, each in enumerate(points[1:-1], 1) if x <= each[0]), len(points) - 1)
    (low, first), (high, second) = points[index - 1], points[index]
    found = first + (second - first) * (x - low) / (high - low)
    if x < low:
        return min(first, max(found, first * x / low))
    return max(found, second) if x > high else found


def _ready(place: int) -> Callable[[StepTimes], float]:
    return lambda each: each.ready[place]


def _needed(ready: float, forward: float, backward: float) -> float:
    """Return when the forward pass comes to a layer: backward reaches it in the opposite order."""
    rest = (ready - forward) / backward if backward > 0 else 1.0
    return forward * min(1.0, max(0.0, 1.0 - rest))
