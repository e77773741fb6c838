"""The study of `sync` modes: the grid of modes and faults, each with several seeds.

cell    a mode with a fault, such as stale:2 with slow:3@rank=1
trial   a cell with one seed, such as "stale-2.slow-3-rank=1.seed0"

A mode that this version, the recipe or the number of parties does not allow is no error of the
study: its cells state the reason, and the others run.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from allstep.errors import ConfigError
from allstep.study.one_precision import precision_override
from allstep.study.study import Study, grid
from allstep.study.sync.modes import fault_options, overrides_of
from allstep.study.train_trial import training
from allstep.study.trial import Trial

SET = {
    "sync": "give --modes",
    "sync.name": "give --modes",
    "shares": "give --modes shares=speed",
    "seed": "give --seeds",
}
"""Config keys that the study itself sets, and what to give instead."""

_NO_NAME = re.compile(r"[^A-Za-z0-9._=+-]+")


@dataclass(frozen=True)
class SyncGrid:
    """The arguments of a sync study."""

    recipe: str
    overrides: tuple[str, ...]
    """Overrides (key=value) of every run."""
    modes: Sequence[str]
    faults: Sequence[str]
    parties: int
    """Number of workers of each run."""
    seeds: int
    epochs: int
    batch: int
    """The global batch, for the updates of a run."""
    goal: float | None = None
    """A validation accuracy; the study reports the seconds of training to it."""
    precision: str | None = None
    """Precision of every run; None if the recipe sets it."""

    def trial(self, mode: str, fault: str, seed: int) -> Trial:
        """Return the trial of a cell and a seed; ConfigError if the mode is not possible here."""
        every = ("evaluation.every=0.25",) if self.goal is not None else ()
        overrides = (
            *every,
            *self.overrides,
            *precision_override(self.precision),
            f"epochs={self.epochs}",
            f"seed={seed}",
            *overrides_of(mode),
        )
        name = ".".join(_NO_NAME.sub("-", each) for each in (mode, fault, f"seed{seed}"))
        facts = {"mode": mode, "fault": fault, "seed": seed}
        options = fault_options(fault)
        return training(name, self.recipe, overrides, facts, self.parties, options)

    @cached_property
    def impossible(self) -> dict[str, str]:
        """Why a mode cannot run, by mode; ConfigError if none of them can."""
        found: dict[str, str] = {}
        for mode in self.modes:
            try:
                self.trial(mode, self.faults[0], 0)
            except ConfigError as error:
                found[mode] = _short(str(error))
        if len(found) == len(self.modes):
            raise ConfigError(f"--modes: none can run: {next(iter(found.values()))}")
        return found

    def trials(self) -> list[Trial]:
        """Return all trials, one seed of every cell first, so that a first table is early.

        The modes of a fault are next to each other: they share a busy moment of the machine.
        """
        possible = [mode for mode in self.modes if mode not in self.impossible]
        return [
            self.trial(mode, fault, seed)
            for seed in range(self.seeds)
            for fault in self.faults
            for mode in possible
        ]

    def study(self) -> Study:
        """Return the study for the runner; modes, faults and seeds may be added later."""
        arguments: dict[str, Any] = {
            "study": "sync",
            "recipe": self.recipe,
            "words": list(self.overrides),
            "epochs": self.epochs,
            "goal": self.goal,
            "parties": self.parties,
            "modes": list(self.modes),
            "faults": list(self.faults),
            "seeds": self.seeds,
        }
        growing = frozenset({"modes", "faults", "seeds"})
        return grid(self.trials(), arguments, growing, self.precision)


def _short(reason: str) -> str:
    """Return the reason without the name of the run, which is that of a mode here."""
    return re.sub(r"^run \S+: ", "", reason)
