"""The learning rate of a run as a function of the samples seen.

The config determines it: the peak scales with the batch, the shape with the length of the run.

```
lr
peak |    ____         warm-up: schedule.warmup epochs up to the peak, then one of the shapes:
     |   /    \\__      constant                        stays at the peak
     |  /        \\__   step                            times schedule.factor at each milestone
 end | /            \\  cosine, linear,                 fall to schedule.end times the peak
     +-------------->  polynomial, exponential
       samples seen    one-cycle                       has its own rise instead of the warm-up,
                                                       then falls to schedule.end times the peak
```

Milestones count epochs from the start of the run; the other shapes span the epochs after the
warm-up. `config.check` rejects combinations that do not fit (a milestone within the warm-up, a
warm-up longer than the run) before the run starts.
"""

from collections.abc import Callable

from allstep.optim import SCALINGS, SCHEDULES, Rate
from allstep.optim.schedules import Schedule, exponential, one_cycle, polynomial, steps
from allstep.train.config.run_config import ResolvedConfig, ScheduleConfig


def peak_lr(config: ResolvedConfig) -> float:
    """Return the highest learning rate of the run: `optimizer.lr`, scaled to the batch."""
    section = config.optimizer
    return SCALINGS[section.scaling](section.lr, config.batch, section.base_batch)


def learning_rate(config: ResolvedConfig, num_train: int) -> Callable[[int], float]:
    """Return a function from samples seen to the learning rate of the next step."""
    peak, schedule = peak_lr(config), config.schedule
    return Rate(
        peak=peak,
        total=config.num_epochs * num_train,
        shape=_steps(config, num_train) if schedule.shape == "step" else _shape(schedule),
        warmup=config.warmup * num_train,
        start=schedule.warmup_from * peak,
        warm_up=schedule.warmup_kind,
        batch=config.batch,
    )


def _shape(schedule: ScheduleConfig) -> Schedule:
    """Return the shape from the peak to `schedule.end`, for all shapes except "step"."""
    if schedule.shape == "constant":
        return SCHEDULES["constant"]
    # An exponential never reaches 0, and one-cycle has an end of its own: 0 selects their defaults.
    if schedule.shape == "exponential":
        return exponential(schedule.end) if schedule.end else exponential()
    if schedule.shape == "one-cycle":
        return one_cycle(end=schedule.end) if schedule.end else one_cycle()
    return _ending_at(
        schedule.end,
        polynomial(schedule.power) if schedule.shape == "polynomial" else SCHEDULES[schedule.shape],
    )


def _steps(config: ResolvedConfig, num_train: int) -> Schedule:
    """Return the shape "step", with milestones as fractions of the samples after the warm-up.

    Computed in samples, like the learning rate, so that rounding does not delay a milestone by a
    step.
    """
    warmup, total = config.warmup * num_train, config.num_epochs * num_train
    rest = total - warmup or 1.0
    return steps(
        [(each * num_train - warmup) / rest for each in config.milestones], config.schedule.factor
    )


def _ending_at(end: float, shape: Schedule) -> Schedule:
    """Return `shape`, which falls from 1 to 0, rescaled to fall from 1 to `end`."""
    return (lambda seen, total: end + (1.0 - end) * shape(seen, total)) if end else shape
