"""The study of data: the same model and number of updates on nested parts of the training split.

trial   a size with one seed, such as "859-seed0"

A run has as many updates as the recipe makes on the whole split, whatever its size: with equal
epochs, small parts would be trained too little, and the curve would be too steep. So a part of 1/64
has about 64 times the epochs, and all that the config counts in epochs is stretched likewise.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from allstep.errors import ConfigError
from allstep.study.one_precision import precision_override
from allstep.study.study import Study, grid
from allstep.study.train_trial import training
from allstep.study.trial import Trial
from allstep.train.config.run_config import RunConfig

_SAME_UPDATES = "all runs have the same number of updates"
SET = {
    "data.use": "give --sizes",
    "seed": "give --seeds",
    "overfit": "give --sizes",
    "evaluation.stop_at": _SAME_UPDATES,
    "evaluation.patience": _SAME_UPDATES,
}
"""Config keys that the study itself sets, and what to give instead, or why."""


def check_growth(config: RunConfig) -> None:
    """Raise ConfigError for a batch that grows: its limit and so the updates depend on the size."""
    if config.growth.at or config.growth.by_noise:
        raise ConfigError(
            "growth: a study of data needs one batch for all sizes; set growth.at=[]"
            " growth.by_noise=false"
        )


@dataclass(frozen=True)
class DataGrid:
    """The arguments of a data study."""

    recipe: str
    overrides: tuple[str, ...]
    """Overrides (key=value) of every run."""
    config: RunConfig
    """The config of a run on the whole training split."""
    whole: int
    """Samples of the training split."""
    sizes: tuple[int, ...]
    """Training samples of each run, in rising order."""
    seeds: int
    goal: float | None = None
    """A validation accuracy; the study states how much data it needs."""
    precision: str | None = None
    """Precision of every run; None if the recipe sets it."""

    @property
    def batch(self) -> int:
        """The samples of an update."""
        return self.config.resolved(1).batch

    @property
    def updates(self) -> int:
        """Updates of a run on the whole training split."""
        return self.config.resolved(1).num_epochs * math.ceil(self.whole / self.batch)

    def epochs(self, size: int) -> int:
        """Return the epochs of a part, whose updates are nearest to those of the whole split."""
        ratio = math.ceil(self.whole / self.batch) / math.ceil(size / self.batch)
        return max(1, round(self.config.epochs * ratio))

    def trial(self, size: int, seed: int) -> Trial:
        """Return the trial of a size and a seed."""
        overrides = (
            *self.overrides,
            *precision_override(self.precision),
            *([] if self.config.batch_per_worker else [f"batch={self.batch}"]),
            *(f"data.use={size}", f"seed={seed}", f"epochs={self.epochs(size)}"),
            *self._stretched(self.epochs(size) / self.config.epochs),
            *("evaluation.patience=null", "evaluation.stop_at=null"),
        )
        facts = {"size": size, "seed": seed}
        made = training(f"{size}-seed{seed}", self.recipe, overrides, facts)
        # Equal updates take equal time, whatever the number of epochs.
        return replace(made, seconds=60.0)

    def _stretched(self, factor: float) -> Iterator[str]:
        """Yield the keys that the config gives in epochs, times `factor`."""
        config = self.config
        lengths = {
            "evaluation.every": config.evaluation.every,
            "save.epochs": config.save.epochs,
            "schedule.warmup": config.schedule.warmup,
        }
        for key, value in lengths.items():
            if value is not None:
                yield f"{key}={value * factor:.9g}"
        if milestones := config.schedule.milestones:
            listed = ",".join(f"{each * factor:.9g}" for each in milestones)
            yield f"schedule.milestones=[{listed}]"

    def trials(self) -> list[Trial]:
        """Return all trials, one seed of every size first, so that a first curve is early."""
        return [self.trial(size, seed) for seed in range(self.seeds) for size in self.sizes]

    def study(self) -> Study:
        """Return the study for the runner; sizes and seeds may be added later.

        The goal is no argument: another one needs no further run.
        """
        arguments: dict[str, Any] = {
            "study": "data",
            "recipe": self.recipe,
            "words": list(self.overrides),
            "epochs": self.config.epochs,
            "samples": self.whole,
            "sizes": list(self.sizes),
            "seeds": self.seeds,
        }
        return grid(self.trials(), arguments, frozenset({"sizes", "seeds"}), self.precision)
