"""The study of large batches: accuracy after the same number of epochs, by batch and remedy.

cell    a batch with a remedy, such as "4096/lars"; run with one or more seeds
trial   a cell with one seed, such as "4096-lars-seed0"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.errors import ConfigError, cut
from allstep.study.batch.remedies import Overrides, overrides_for
from allstep.study.one_precision import precision_override
from allstep.study.study import Study, grid
from allstep.study.train_trial import training
from allstep.study.trial import Trial

_BY_REMEDY = "give a remedy of your own with --remedy"
SET = {
    "batch": "give --batches",
    "batch_per_worker": "give --batches",
    "seed": "give --seeds",
    **dict.fromkeys(("optimizer.scaling", "schedule.warmup", "schedule.warmup_kind"), _BY_REMEDY),
}
"""Config keys that the study itself sets, and what to give instead."""


@dataclass(frozen=True)
class BatchGrid:
    """The arguments of a batch study."""

    recipe: str
    overrides: tuple[str, ...]
    """Overrides (key=value) of every run."""
    base_batch: int
    """The batch for which the recipe's learning rate was found."""
    epochs: int
    goal: float | None
    """A validation accuracy; the study reports each run's updates and seconds to it."""
    remedies: Mapping[str, Overrides]
    seeds: Mapping[str, int]
    """Number of seeds by cell."""
    precision: str | None = None
    """Precision of every run; None if the recipe sets it."""

    @property
    def batches(self) -> list[int]:
        """The batches in rising order."""
        return sorted({int(cell.partition("/")[0]) for cell in self.seeds})

    def trial(self, batch: int, remedy: str, seed: int) -> Trial:
        """Return the trial of a cell and a seed; cells with the same overrides share a trial."""
        own = self._overrides(batch, remedy)
        name = next(name for name in self.remedies if self._overrides(batch, name) == own)
        every = ("evaluation.every=0.5",) if self.goal is not None else ()
        overrides = (
            *every,
            *self.overrides,
            *precision_override(self.precision),
            f"epochs={self.epochs}",
            f"batch={batch}",
            f"seed={seed}",
            *own,
        )
        facts = {"batch": batch, "remedy": name, "seed": seed}
        return training(f"{batch}-{name}-seed{seed}", self.recipe, overrides, facts)

    def _overrides(self, batch: int, remedy: str) -> Overrides:
        return overrides_for(self.remedies[remedy], batch, self.base_batch, self.epochs)

    def trials(self) -> list[Trial]:
        """Return all trials, the first seed of every cell first, so that a first table is early."""
        found: dict[str, Trial] = {}
        for seed in range(max(self.seeds.values())):
            for cell, num_seeds in self.seeds.items():
                if seed < num_seeds:
                    batch, _, remedy = cell.partition("/")
                    trial = self.trial(int(batch), remedy, seed)
                    found.setdefault(trial.name, trial)
        return list(found.values())

    def study(self) -> Study:
        """Return the study for the runner; cells and seeds may be added to a study that has run."""
        arguments: dict[str, Any] = {
            "study": "batch",
            "recipe": self.recipe,
            "words": list(self.overrides),
            "epochs": self.epochs,
            "goal": self.goal,
            "remedies": {name: list(each) for name, each in self.remedies.items()},
            "seeds": dict(self.seeds),
        }
        return grid(
            self.trials(),
            arguments,
            growing=frozenset({"remedies", "seeds"}),
            precision=self.precision,
        )


_MAX_DIGITS = 9
# of one cell; each seed is a run
_MAX_SEEDS = 1000


def parse_batches(text: str, option: str = "--batches") -> list[int]:
    """Return the numbers of a list such as 128,1024,4096, in rising order.

    Raise ConfigError, with the name of the `option`, for any other text.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [
        part for part in parts if not part.isdecimal() or len(part) > _MAX_DIGITS or int(part) < 1
    ]
    if wrong or not parts:
        found = cut(repr(wrong[0])) if wrong else "nothing"
        raise ConfigError(f"{option}: expected sizes such as 128,1024,4096, found {found}")
    return sorted({int(part) for part in parts})


def parse_seeds(text: str, batches: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """Return the number of seeds by cell.

    `text` is "1" or, with exceptions for a batch or a cell, "1,128=3,4096/plain=3,4096/lars=3".
    """
    cells = {f"{batch}/{name}": 0 for batch in batches for name in names}
    first, *exceptions = [part.strip() for part in text.split(",")]
    for which, number in [("", first), *(_exception(part) for part in exceptions)]:
        covered = [cell for cell in cells if which in ("", cell, cell.partition("/")[0])]
        if (
            not number.isdecimal()
            or len(number) > _MAX_DIGITS
            or not 1 <= int(number) <= _MAX_SEEDS
            or not covered
        ):
            problem = (
                f"no cell is called {which!r}"
                if number.isdecimal() and not covered
                else f"found {cut(repr(text))}"
            )
            raise ConfigError(
                f"--seeds: {problem}; expected a number from 1 to {_MAX_SEEDS}, and exceptions such"
                f" as {batches[-1]}=3 or {batches[-1]}/{names[-1]}=3"
            )
        cells.update(dict.fromkeys(covered, int(number)))
    return cells


def _exception(text: str) -> tuple[str, str]:
    which, _, number = text.partition("=")
    return which or "?", number
