"""The study of large batches: how good is a model after the same number of epochs, by batch and
remedy?

cell    a batch with a remedy, "4096/lars"; run with one seed or several
trial   "4096-lars-seed0"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.errors import ConfigError, cut
from allstep.study.batch.remedies import Words, words_for
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
"""Keys that the study itself sets, and what to give instead."""


@dataclass(frozen=True)
class BatchGrid:
    """What is asked."""

    recipe: str
    words: tuple[str, ...]
    """key=value, for every run."""
    base_batch: int
    """The batch that the recipe's rate was found with."""
    epochs: int
    goal: float | None
    """A validation accuracy; the study tells how many updates and seconds each run needs to it."""
    remedies: Mapping[str, Words]
    seeds: Mapping[str, int]
    """Number of seeds of each cell."""
    precision: str | None = None
    """Of every run, where the recipe leaves it to the machine."""

    @property
    def batches(self) -> list[int]:
        """In rising order."""
        return sorted({int(cell.partition("/")[0]) for cell in self.seeds})

    def trial(self, batch: int, remedy: str, seed: int) -> Trial:
        """Cells whose words are the same share one."""
        words = self._words(batch, remedy)
        name = next(name for name in self.remedies if self._words(batch, name) == words)
        every = ("evaluation.every=0.5",) if self.goal is not None else ()
        said = (
            *every,
            *self.words,
            *precision_override(self.precision),
            f"epochs={self.epochs}",
            f"batch={batch}",
            f"seed={seed}",
            *words,
        )
        facts = {"batch": batch, "remedy": name, "seed": seed}
        return training(f"{batch}-{name}-seed{seed}", self.recipe, said, facts)

    def _words(self, batch: int, remedy: str) -> Words:
        return words_for(self.remedies[remedy], batch, self.base_batch, self.epochs)

    def trials(self) -> list[Trial]:
        """The first seed of all cells before the second of any: a first table is there early."""
        found: dict[str, Trial] = {}
        for seed in range(max(self.seeds.values())):
            for cell, num_seeds in self.seeds.items():
                if seed < num_seeds:
                    batch, _, remedy = cell.partition("/")
                    trial = self.trial(int(batch), remedy, seed)
                    found.setdefault(trial.name, trial)
        return list(found.values())

    def study(self) -> Study:
        """For the runner. Cells and seeds may be added to a study that has run."""
        arguments: dict[str, Any] = {
            "study": "batch",
            "recipe": self.recipe,
            "words": list(self.words),
            "epochs": self.epochs,
            "goal": self.goal,
            "remedies": {name: list(words) for name, words in self.remedies.items()},
            "seeds": dict(self.seeds),
        }
        return grid(
            self.trials(),
            arguments,
            growing=frozenset({"remedies", "seeds"}),
            precision=self.precision,
        )


_MAX_DIGITS = 9
# Of one cell: each is a run.
_MAX_SEEDS = 1000


def parse_batches(text: str, option: str = "--batches") -> list[int]:
    """The numbers of a list such as 128,1024,4096, in rising order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [
        word for word in words if not word.isdecimal() or len(word) > _MAX_DIGITS or int(word) < 1
    ]
    if wrong or not words:
        found = cut(repr(wrong[0])) if wrong else "nothing"
        raise ConfigError(f"{option}: expected sizes such as 128,1024,4096, found {found}")
    return sorted({int(word) for word in words})


def parse_seeds(text: str, batches: Sequence[int], names: Sequence[str]) -> dict[str, int]:
    """Seeds by cell, from "1" or, with exceptions, "1,128=3,4096/plain=3,4096/lars=3"."""
    cells = {f"{batch}/{name}": 0 for batch in batches for name in names}
    first, *exceptions = [word.strip() for word in text.split(",")]
    for which, number in [("", first), *(_exception(word) for word in exceptions)]:
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


def _exception(word: str) -> tuple[str, str]:
    which, _, number = word.partition("=")
    return which or "?", number
