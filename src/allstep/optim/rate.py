"""The learning rate of a run: warm-up and schedule in one value, called with the samples seen.

```
rate = Rate(peak=3.2, start=0.1, warmup=5 * 60_000, total=90 * 60_000, batch=8192,
            shape=SCHEDULES["step"])
rate(seen)        # for the step that comes after `seen` samples
```
"""

from dataclasses import dataclass

from allstep.errors import ConfigError, did_you_mean
from allstep.optim.schedules import WARM_UPS, Schedule, constant


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate by samples seen: `rate(seen)` is that of the step after `seen` samples."""

    peak: float
    """The highest learning rate, at which the shape's factor is 1."""
    total: float
    """Samples of the whole run."""
    shape: Schedule = constant
    """The schedule from the end of the warm-up to the end of the run; default: constant."""
    warmup: float = 0.0
    """Samples of the warm-up."""
    start: float = 0.0
    """The learning rate at the start of a gradual warm-up, or during a constant one."""
    warm_up: str = "gradual"
    """The kind of warm-up: gradual, constant or none."""
    batch: int = 0
    """Samples of a step.

    A gradual warm-up includes the next step: a first step at learning rate 0 would be wasted.
    """

    def __post_init__(self) -> None:
        if self.warm_up not in WARM_UPS:
            raise ConfigError(
                f"warm-up {self.warm_up!r} is unknown; {did_you_mean(self.warm_up, WARM_UPS)}"
            )
        if not (self.total > 0 and 0 <= self.warmup <= self.total):
            raise ConfigError(
                f"a warm-up of {self.warmup:g} samples in a run of {self.total:g}: the run must"
                " have some samples, and the warm-up no more"
            )
        if self.peak < 0 or self.start < 0:
            raise ConfigError(
                f"learning rates must be at least 0: peak {self.peak:g}, start {self.start:g}"
            )

    def __call__(self, seen: float) -> float:
        """Return the learning rate of the step after `seen` samples.

        Raise ConfigError before the start and after the end of the run.
        """
        if not 0 <= seen <= self.total:
            raise ConfigError(
                f"the schedule covers {self.total:g} samples, but the learning rate after {seen:g}"
                " was requested: train for fewer epochs, or make the schedule longer"
            )
        if self.warm_up == "none" or seen >= self.warmup:
            warmup = self.warmup if self.warm_up != "none" else 0.0
            return self.peak * self.shape(seen - warmup, self.total - warmup)
        ahead = self.batch if self.warm_up == "gradual" else 0
        return self.start + (self.peak - self.start) * WARM_UPS[self.warm_up](
            seen + ahead, self.warmup
        )
