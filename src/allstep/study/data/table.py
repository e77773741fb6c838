"""Results of a data study: errors by size, the curve through them, and what it means.

The curve is fitted to validation errors, as every decision of a study is; the test errors next to
them are measured once, at the end of each run.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from allstep.console.markdown_table import table
from allstep.runlog import number
from allstep.study.data.curve_text import curve_sections
from allstep.study.data.improvement import Improvement, improvement
from allstep.study.data.learning_curve import (
    Check,
    Curve,
    Points,
    pooled_spreads,
    refusal,
    self_check,
)
from allstep.study.data.study import DataGrid
from allstep.study.data.verdict import SAFE, Verdict, judge
from allstep.study.results import RunFigures, figures, validations
from allstep.study.trial import Outcome, Results


@dataclass(frozen=True)
class Size:
    """A number of training samples, and its runs that have ended."""

    samples: int
    epochs: int
    runs: tuple[RunFigures, ...]

    @property
    def validation(self) -> list[float]:
        """Validation errors at the end of the runs."""
        return [1 - run.validation for run in self.runs if run.validation is not None]

    @property
    def test(self) -> list[float]:
        """Test errors of the runs."""
        return [1 - run.test for run in self.runs if run.test is not None]


@dataclass(frozen=True)
class DataTable:
    """The results of a data study."""

    grid: DataGrid
    results: Results

    def _ended(self, size: int) -> list[Outcome]:
        names = [self.grid.trial(size, seed).name for seed in range(self.grid.seeds)]
        return [self.results[name] for name in names if name in self.results]

    @cached_property
    def sizes(self) -> list[Size]:
        """The sizes in rising order."""
        grid = self.grid
        return [
            Size(
                size,
                grid.epochs(size),
                tuple(figures(each, grid.batch, grid.goal) for each in self._ended(size)),
            )
            for size in grid.sizes
        ]

    @cached_property
    def points(self) -> Points:
        """Mean validation errors of the sizes that have one, with their spreads."""
        have = [size for size in self.sizes if size.validation]
        if not have:
            return Points((), (), ())
        errors = [size.validation for size in have]
        spreads, freedom = pooled_spreads(errors, self._num_evaluated())
        samples = tuple(float(size.samples) for size in have)
        return Points(samples, tuple(map(fmean, errors)), spreads, freedom)

    def _num_evaluated(self) -> int:
        """Return the number of validation samples, which is the same in all runs."""
        lines = (validations(each.record) for each in self.results.values())
        found = [int(number(each[-1], "count") or 0) for each in lines if each]
        return max([1, *found])

    @cached_property
    def refused(self) -> str:
        """Why there is no curve; "" if there is one."""
        return refusal(self.points)

    @cached_property
    def curve(self) -> Curve | None:
        """The fitted curve; None if the points do not allow one."""
        return None if self.refused else Curve(self.points)

    @cached_property
    def checks(self) -> list[Check]:
        """Predictions of the largest size from smaller ones."""
        return self_check(self.points)

    @cached_property
    def verdict(self) -> Verdict | None:
        """What the goal needs; None without a goal."""
        goal = self.grid.goal
        return None if goal is None else judge(self.points, self.curve, goal, self.grid.whole)

    @cached_property
    def last_fifth(self) -> Improvement | None:
        """The improvement of the largest size in the last fifth of its runs."""
        return improvement([each.record for each in self._ended(self.grid.sizes[-1])])

    def draw(self, file: Path) -> None:
        """Write the plot of the curve to `file`."""
        from allstep.study.data.curve_plot import draw

        draw(self, file)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "samples": self.grid.whole,
            "updates": self.grid.updates,
            "sizes": [asdict(each) for each in self.sizes],
            "points": asdict(self.points),
            "no_curve": self.refused or None,
            "curve": None if self.curve is None else self._curve_as_json(self.curve),
            "self_check": [
                {
                    "up_to": each.up_to,
                    "predicted": each.predicted[:3],
                    "measured": each.measured,
                    "off": None if math.isnan(each.off) else each.off,
                    "inside": each.is_inside,
                }
                for each in self.checks
            ],
            "goal": self.grid.goal,
            "verdict": self.verdict and self.verdict.as_json(),
            "last_fifth": self.last_fifth
            and {**self.last_fifth._asdict(), "improving": self.last_fifth.is_real},
        }

    def _curve_as_json(self, curve: Curve) -> dict[str, Any]:
        fitted = {"with_floor": curve.with_floor, "without_floor": curve.without_floor}
        laws = {
            name: {
                "floor": float(each.law.floor[0]),
                "factor": float(each.law.factor[0]),
                "exponent": float(each.law.exponent[0]),
                "chi2": float(each.chi2[0]),
            }
            for name, each in fitted.items()
        }
        multiples = (1, 2, 5, SAFE)
        return {
            **laws,
            "separated": curve.is_separated,
            "floor_range": [curve.floor.low, curve.floor.high],
            "predicted": {str(m): curve.predict(m * self.grid.whole)[:3] for m in multiples},
        }

    def markdown(self) -> str:
        """Return the whole page."""
        grid = self.grid
        parts = [
            f"# {grid.recipe}: error by number of training samples",
            (
                f"Error in % after about {grid.updates:,} updates, whatever the size; mean ± std"
                " over seeds, where there are several. The curve goes through the validation"
                " errors."
            ),
            self._by_size(),
            *curve_sections(self.curve, self.refused, self.checks, grid.whole),
            *self._updates_line(),
            *([] if self.verdict is None else ["## Goal", _sentence(self.verdict.text)]),
        ]
        return "\n\n".join(parts) + "\n"

    def _by_size(self) -> str:
        head = ["samples", "of all", "epochs", "updates", "validation error", "test error"]
        return table(head, [self._row(size) for size in self.sizes])

    def _row(self, size: Size) -> list[str]:
        updates = f"{max(run.updates for run in size.runs):,}" if size.runs else "-"
        lost = [run.status for run in size.runs if run.validation is None]
        why = lost[0] if lost else "-"
        return [
            f"{size.samples:,}",
            f"{size.samples / self.grid.whole:.3g}",
            f"{size.epochs:,}",
            updates,
            _shown(size.validation) or why,
            _shown(size.test) or why,
        ]

    def _updates_line(self) -> list[str]:
        found = self.last_fifth
        if found is None:
            return []
        run = (
            f"In the last fifth of the runs with the most samples the validation error went from"
            f" {found.before:.2%} to {found.after:.2%}"
        )
        if not found.is_real:
            return [f"{run}: no more than chance, so the number of updates was sufficient."]
        return [
            f"{run}: they still improved. More updates (`--epochs {2 * self.grid.config.epochs}`)"
            " may lower that error, and too few updates look like a floor."
        ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _shown(errors: Sequence[float]) -> str:
    """Return mean and std in percent; "" without errors."""
    if not errors:
        return ""
    spread = f" ± {100 * stdev(errors):.2f}" if len(errors) > 1 else ""
    return f"{100 * fmean(errors):.2f}{spread}"
