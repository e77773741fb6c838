"""The learning rate of a run by samples seen, as its config says: the peak follows the batch, the
shape follows the run.

```
rate
peak |    ____               schedule.warmup epochs up to the peak, then the shape over the rest of the run:
     |   /    \\__            constant             stays; step: falls by schedule.factor at its milestones, and stays there
     |  /        \\__         cosine, linear, polynomial, exponential       fall to schedule.end of the peak
 end | /            \\        one-cycle            rises by itself, without a warm-up, and falls to
 schedule.end
     +-----------------> samples seen
```

Milestones count epochs from the start of the run, shapes the part of it that follows the warm-up.
What does not fit together (a milestone within the warm-up, a warm-up longer than the run) is found
by `config.check` before anything starts.
"""

from collections.abc import Callable

from allstep.optim import SCALINGS, SCHEDULES, Rate
from allstep.optim.schedules import Schedule, exponential, one_cycle, polynomial, steps
from allstep.train.config.run_config import ResolvedConfig, ScheduleConfig


def peak_lr(config: ResolvedConfig) -> float:
    """The highest rate of the run: the recipe's, scaled to the batch."""
    section = config.optimizer
    return SCALINGS[section.scaling](section.lr, config.batch, section.base_batch)


def learning_rate(config: ResolvedConfig, num_train: int) -> Callable[[int], float]:
    """The rate for the step after so many samples."""
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
    """Between the peak and `end`; those that have an end of their own are told ours."""
    if schedule.shape == "constant":
        return SCHEDULES["constant"]
    if schedule.shape == "exponential":
        return exponential(schedule.end) if schedule.end else exponential()  # it never comes to 0
    if schedule.shape == "one-cycle":
        return one_cycle(end=schedule.end) if schedule.end else one_cycle()
    return _ending_at(
        schedule.end,
        polynomial(schedule.power) if schedule.shape == "polynomial" else SCHEDULES[schedule.shape],
    )


def _steps(config: ResolvedConfig, num_train: int) -> Schedule:
    """In samples, as the rate counts them: a milestone then comes with the step that begins there,
    not one later by rounding."""
    warmup, total = config.warmup * num_train, config.num_epochs * num_train
    rest = total - warmup or 1.0
    return steps(
        [(each * num_train - warmup) / rest for each in config.milestones], config.schedule.factor
    )


def _ending_at(end: float, shape: Schedule) -> Schedule:
    """A shape that falls to 0, squeezed between its peak and `end`."""
    return (lambda seen, total: end + (1.0 - end) * shape(seen, total)) if end else shape
