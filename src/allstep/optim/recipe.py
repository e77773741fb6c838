"""The part of a training recipe that determines the size of its steps: the input of `scale`, which
returns its large-batch form.

    small = Recipe(lr=0.1, batch=128, num_samples=60_000, epochs=30, schedule="step",
                   milestones=(10, 20))
    small.rate()(seen)        # the learning rate

It has only the values that `optim` needs; a whole run is `train`'s RunConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from allstep.errors import ConfigError, did_you_mean
from allstep.optim.rate import Rate
from allstep.optim.schedules import SCHEDULES, WARM_UPS, Schedule, steps

RULES: Mapping[str, str] = {
    "sgd": "linear",
    "larc": "linear",
    "lars": "square-root",
    "lamb": "square-root",
    "novograd": "square-root",
    "adam": "square-root",
    "adamw": "square-root",
}
"""Optimizers by name, with the usual scaling rule of each."""

OWN_WARM_UP = frozenset({"one-cycle"})
"""Schedules that begin with a warm-up of their own and allow no other."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The part of a training recipe that determines the size of its steps.

    Epochs may be fractions. Raise ConfigError for values that cannot be right.
    """

    lr: float
    """The highest learning rate."""
    num_samples: int
    """Samples of the training split."""
    epochs: float
    """Epochs of the run."""
    batch: int | None
    """Samples of an update, over all workers, that `lr` was chosen for; None if unknown."""
    optimizer: str = "sgd"
    """A key of `RULES`."""
    momentum: float = 0.9
    """The momentum of SGD, LARS and LARC."""
    schedule: str = "cosine"
    """A key of `SCHEDULES`."""
    milestones: tuple[float, ...] = ()
    """Epochs, from the start of the run, at which the schedule "step" lowers the learning rate.

    Default: 1/3, 2/3 and 8/9 of the run after the warm-up.
    """
    factor: float = 0.1
    """Factor of the learning rate at each milestone."""
    warm_up: str = "none"
    """The kind of warm-up: gradual, constant or none."""
    warm_up_epochs: float = 0.0
    """Epochs of the warm-up."""
    warm_up_from: float = 0.0
    """The learning rate at the start of the warm-up."""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("optimizer", self.optimizer, RULES),
            ("schedule", self.schedule, SCHEDULES),
            ("warm-up", self.warm_up, WARM_UPS),
        ):
            if value not in known:
                raise ConfigError(f"{what} {value!r} is unknown; {did_you_mean(value, known)}")
        problem = self._problem()
        if problem:
            raise ConfigError(f"recipe: {problem}")

    def _problem(self) -> str | None:
        """Describe what is wrong with the recipe; None if it is valid."""
        if not self.lr > 0:
            return f"the learning rate {self.lr} must be above 0"
        if self.num_samples < 1 or not self.epochs > 0:
            return f"{self.epochs} epochs of {self.num_samples} samples: both must be above 0"
        if self.batch is not None and not 1 <= self.batch <= self.num_samples:
            return f"a batch of {self.batch} from {self.num_samples} samples: from 1 to all of them"
        if not 0 <= self.momentum < 1:
            return f"the momentum {self.momentum} must be from 0 to below 1"
        if not 0 <= self.warm_up_epochs <= self.epochs:
            return (
                f"a warm-up of {self.warm_up_epochs} epochs in {self.epochs}: from 0 to all of them"
            )
        if self._warm_up_epochs and self.schedule in OWN_WARM_UP:
            return (
                f"the schedule {self.schedule!r} has a warm-up of its own, and after one of"
                f" {self._warm_up_epochs:g} epochs to {self.lr:g} the learning rate would drop and"
                ' rise again: warm_up="none", or another schedule'
            )
        if not 0 <= self.warm_up_from <= (self.lr if self._warm_up_epochs else float("inf")):
            return (
                f"a warm-up from {self.warm_up_from:g} to {self.lr:g} does not rise: it must start"
                " between 0 and the learning rate"
            )
        if self.milestones and self.schedule != "step":
            return (
                f'milestones {self.milestones} belong to the schedule "step", not to'
                f" {self.schedule!r}"
            )
        if any(not self._warm_up_epochs < each < self.epochs for each in self.milestones):
            between = (
                f"after the warm-up ({self._warm_up_epochs:g}) and before the end ({self.epochs:g})"
            )
            return f"milestones {self.milestones} must be {between}"
        return None

    @property
    def num_updates(self) -> int:
        """The approximate updates of the whole run: the last batch of an epoch may be smaller."""
        return max(1, round(self.epochs * self.num_samples / self.known_batch))

    @property
    def known_batch(self) -> int:
        """The batch; raises ConfigError if it is unknown."""
        if self.batch is None:
            raise ConfigError(
                f"the reference batch of the learning rate {self.lr:g} is unknown, so the recipe"
                " cannot be scaled: set Recipe(batch=...)"
            )
        return self.batch

    @property
    def _warm_up_epochs(self) -> float:
        """Epochs of the warm-up; 0 if there is none."""
        return 0.0 if self.warm_up == "none" else self.warm_up_epochs

    def rate(self) -> Rate:
        """Return the learning rate as a function of the samples seen."""
        return Rate(
            peak=self.lr,
            total=self.epochs * self.num_samples,
            shape=self._shape(),
            warmup=self._warm_up_epochs * self.num_samples,
            start=self.warm_up_from,
            warm_up=self.warm_up,
            batch=self.batch or 0,
        )

    def _shape(self) -> Schedule:
        """Return the schedule after the warm-up.

        Milestones count from the start of the run, schedules from the end of the warm-up.
        """
        if self.schedule != "step":
            return SCHEDULES[self.schedule]
        if not self.milestones:
            return steps(factor=self.factor)
        before = self._warm_up_epochs
        return steps(
            [(each - before) / (self.epochs - before) for each in self.milestones], self.factor
        )
