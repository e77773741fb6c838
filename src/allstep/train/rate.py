"""The learning rate of a run by samples seen, as its config says: the peak follows the batch, the shape follows the run."""

from collections.abc import Callable

from allstep.optim import SCALINGS, SCHEDULES, Rate
from allstep.optim.schedules import Schedule, polynomial, steps
from allstep.train.config import RunConfig

_USUAL_MILESTONES = (1 / 3, 2 / 3, 8 / 9)
"""Parts of the run: epochs 30, 60 and 80 of 90 (Goyal et al. 2017)."""


def peak_rate(config: RunConfig) -> float:
    """The highest rate of the run: the recipe's, scaled to the batch."""
    section = config.optimizer
    return SCALINGS[section.scaling](section.lr, config.global_batch, section.base_batch)


def learning_rate(config: RunConfig, num_train: int) -> Callable[[int], float]:
    """The rate for the step after so many samples. A warm-up that is longer than the run fills it."""
    peak, schedule = peak_rate(config), config.schedule
    total = config.num_epochs * num_train
    warmup = 0.0 if schedule.warmup_kind == "none" else min(schedule.warmup * num_train, total)
    return Rate(
        peak=peak,
        total=total,
        shape=_ending_at(schedule.end, _shape(config, num_train, warmup, total)),
        warmup=warmup,
        start=schedule.warmup_from * peak,
        warm_up=schedule.warmup_kind,
        batch=config.global_batch,
    )


def _shape(config: RunConfig, num_train: int, warmup: float, total: float) -> Schedule:
    """Milestones count epochs from the start of the run, shapes the part of it that follows the warm-up."""
    schedule = config.schedule
    if schedule.shape == "polynomial":
        return polynomial(schedule.power)
    if schedule.shape != "step":
        return SCHEDULES[schedule.shape]
    milestones = schedule.milestones or [part * config.epochs for part in _USUAL_MILESTONES]
    stretched = config.num_epochs / config.epochs
    places = (
        [(each * stretched * num_train - warmup) / (total - warmup) for each in milestones] if warmup < total else []
    )
    return steps([place for place in places if place > 0], schedule.factor)


def _ending_at(end: float, shape: Schedule) -> Schedule:
    """The shape, squeezed between its peak and `end`."""
    return (lambda seen, total: end + (1.0 - end) * shape(seen, total)) if end else shape
