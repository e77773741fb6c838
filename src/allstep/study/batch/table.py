"""Results of a batch study: a table for readers, and all figures for programs.

Remedies are compared by validation accuracy; the quoted accuracy is the test accuracy, measured
once at the end of each run. A cell of the table is the mean over its seeds ± their std.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from allstep.console.markdown_table import table
from allstep.study.batch.study import BatchGrid
from allstep.study.fit import Fit, fit
from allstep.study.results import RunFigures, figures
from allstep.study.trial import Results

# a difference of accuracy below the noise: seeds differ by more
_NOTHING = 0.001


@dataclass(frozen=True)
class Cell:
    """A batch with a remedy, and its runs that have ended."""

    batch: int
    remedy: str
    runs: tuple[RunFigures, ...]

    def values(self, of: Callable[[RunFigures], float | None]) -> list[float]:
        """Return the values that `of` gives for the runs, without those that are None."""
        return [value for run in self.runs if (value := of(run)) is not None]

    @property
    def test(self) -> list[float]:
        """Test accuracies of the runs."""
        return self.values(lambda run: run.test)

    @property
    def validation(self) -> list[float]:
        """Validation accuracies of the runs."""
        return self.values(lambda run: run.validation)

    @property
    def updates(self) -> list[float]:
        """Updates to the goal, of the runs that reached it."""
        return self.values(lambda run: run.reached.updates if run.reached else None)

    @property
    def seconds(self) -> list[float]:
        """Seconds of training to the goal, of the runs that reached it."""
        return self.values(lambda run: run.reached.seconds if run.reached else None)

    def shown(self, values: Sequence[float], form: str, scale: float = 1.0) -> str:
        """Return mean and std of `values` as text, with the number of runs without a value and why.

        `form` is a format specification such as ".2f", applied to the values times `scale`.
        """
        if not self.runs:
            return "-"
        lost = self._lost(len(self.runs) - len(values))
        if not values:
            return lost
        mean = f"{fmean(values) * scale:{form}}"
        spread = f" ± {stdev(values) * scale:{form}}" if len(values) > 1 else ""
        return mean + spread + (f" ({lost})" if lost else "")

    def _lost(self, missing: int) -> str:
        if not missing:
            return ""
        kinds = [run.status for run in self.runs if run.status in ("diverged", "failed")]
        what = kinds[0] if len(kinds) == missing and len(set(kinds)) == 1 else "not reached"
        return what if missing == len(self.runs) else f"{missing} of {len(self.runs)} {what}"


@dataclass(frozen=True)
class Choice:
    """The best remedy for a batch, and the test accuracies that show what it recovers."""

    batch: int
    remedy: str
    plain: float | None
    """Test accuracy of plain with this batch; None without a run."""
    best: float
    """Test accuracy of the best remedy with this batch."""
    baseline: float
    """Test accuracy of plain with the smallest batch."""

    @property
    def won_back(self) -> float | None:
        """Fraction that the remedy recovers of the accuracy that plain loses to the baseline.

        None if plain has no run or loses a tenth of a percentage point or less.
        """
        if self.plain is None or self.baseline - self.plain <= _NOTHING:
            return None
        return (self.best - self.plain) / (self.baseline - self.plain)


@dataclass(frozen=True)
class BatchTable:
    """All cells of a batch study."""

    grid: BatchGrid
    results: Results

    @cached_property
    def cells(self) -> dict[tuple[int, str], Cell]:
        """Cells by batch and remedy."""
        found = {}
        for key, num_seeds in self.grid.seeds.items():
            batch, remedy = int(key.partition("/")[0]), key.partition("/")[2]
            names = [self.grid.trial(batch, remedy, seed).name for seed in range(num_seeds)]
            ended = [self.results[name] for name in names if name in self.results]
            runs = tuple(figures(outcome, batch, self.grid.goal) for outcome in ended)
            found[batch, remedy] = Cell(batch, remedy, runs)
        return found

    def choices(self) -> list[Choice]:
        """Return the best remedy of each batch by validation accuracy; [] without a baseline."""
        baseline = self.cells.get((self.grid.batches[0], "plain"))
        if baseline is None or not baseline.test:
            return []
        return [
            Choice(batch, best.remedy, self._plain(batch), fmean(best.test), fmean(baseline.test))
            for batch in self.grid.batches
            if (best := self._best(batch)) is not None
        ]

    def _best(self, batch: int) -> Cell | None:
        """Return the cell of the best remedy for `batch`.

        Only seeds that all remedies of the batch have run count, so that a mean over three seeds is
        not compared with one lucky seed. A remedy with a run that diverged is excluded.
        """
        whole = [
            cell
            for cell in self.cells.values()
            if cell.batch == batch
            and cell.runs
            and len(cell.validation) == len(cell.test) == len(cell.runs)
        ]
        common = min((len(cell.validation) for cell in whole), default=0)
        return max(whole, key=lambda cell: fmean(cell.validation[:common]), default=None)

    def _plain(self, batch: int) -> float | None:
        cell = self.cells.get((batch, "plain"))
        return fmean(cell.test) if cell and cell.test else None

    def fit(self, remedy: str) -> Fit | None:
        """Fit the updates to the goal over the batches at which all runs of `remedy` reached it."""
        cells = [cell for cell in self.cells.values() if cell.remedy == remedy and cell.updates]
        whole = [cell for cell in cells if len(cell.updates) == len(cell.runs)]
        return fit([cell.batch for cell in whole], [fmean(cell.updates) for cell in whole])

    def draw(self, file: Path) -> None:
        """Write the plots of accuracy, updates and time by batch to `file`."""
        from allstep.study.batch.plots import draw

        draw(self, file)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "cells": [asdict(cell) for cell in self.cells.values()],
            "choices": [
                {**asdict(choice), "won_back": choice.won_back} for choice in self.choices()
            ],
            "fits": {
                name: asdict(found)
                for name in self.grid.remedies
                if (found := self.fit(name)) is not None
            },
        }

    def markdown(self) -> str:
        """Return the whole page."""
        parts = [
            f"# {self.grid.recipe}: accuracy by batch and remedy",
            (
                f"Test accuracy in % after {self.grid.epochs} epochs; mean ± std"
                " over seeds, where there are several."
            ),
            self._by_batch(lambda cell: cell.shown(cell.test, ".2f", 100)),
            "Validation accuracy, by which remedies and their learning rates are chosen:",
            self._by_batch(lambda cell: cell.shown(cell.validation, ".2f", 100)),
            *self._choices_section(),
            *(self._goal_sections(self.grid.goal) if self.grid.goal is not None else ()),
        ]
        return "\n\n".join(parts) + "\n"

    def _by_batch(self, shown: Callable[[Cell], str]) -> str:
        names = list(self.grid.remedies)
        nothing = Cell(0, "", ())
        rows = [
            [str(batch), *(shown(self.cells.get((batch, name), nothing)) for name in names)]
            for batch in self.grid.batches
        ]
        return table(["batch", *names], rows)

    def _choices_section(self) -> list[str]:
        choices = self.choices()
        if not choices:
            return []
        rows = [
            [
                str(choice.batch),
                choice.remedy,
                f"{choice.best:.2%}",
                "-" if choice.plain is None else f"{100 * (choice.baseline - choice.plain):.2f}",
                f"{100 * (choice.baseline - choice.best):.2f}",
                "-" if choice.won_back is None else f"{choice.won_back:.0%}",
            ]
            for choice in choices
        ]
        head = ["batch", "best remedy", "test accuracy", "plain loses", "it loses", "won back"]
        summary = (
            "The best remedy by validation accuracy. Points lost against plain at batch"
            f" {self.grid.batches[0]}."
        )
        return ["## Best remedy", summary, table(head, rows)]

    def _goal_sections(self, goal: float) -> list[str]:
        fits = [
            (name, found) for name in self.grid.remedies if (found := self.fit(name)) is not None
        ]
        rows = [
            [
                name,
                f"{each.fewest_updates:.0f}",
                f"{each.fewest_samples:.0f}",
                f"{each.critical_batch:.0f}",
                f"{each.rms:.0%}",
            ]
            for name, each in fits
        ]
        fitted = [
            "The fit S = Smin + Emin / B, least squares of relative distances:",
            table(["remedy", "Smin (updates)", "Emin (samples)", "critical batch", "rms"], rows),
        ]
        return [
            f"## Updates to {goal:.0%} validation accuracy",
            self._by_batch(lambda cell: cell.shown(cell.updates, ".0f")),
            *(fitted if rows else []),
            f"## Seconds of training to {goal:.0%} validation accuracy, on one core",
            self._by_batch(lambda cell: cell.shown(cell.seconds, ".0f")),
        ]
