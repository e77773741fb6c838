"""Results of a sync study: accuracy, throughput, time to a goal and staleness, by fault and mode.

Modes are compared with `allreduce`, or with the first mode, under the same fault. A cell of the
table is the mean over its seeds ± their std.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from allstep.console.markdown_table import table
from allstep.runlog import RunRecord, kept, number
from allstep.study.results import RunFigures, figures
from allstep.study.sync.modes import NO_FAULT, SYNCHRONOUS
from allstep.study.sync.study import SyncGrid
from allstep.study.trial import Outcome, Results
from allstep.train.watch.recorded_sync import recorded_sync


@dataclass(frozen=True)
class SyncRun:
    """The figures of one run."""

    run: RunFigures
    images_per_second: float | None
    """Training samples per second over all workers, without evaluations and the first line."""
    staleness: float | None
    """Mean age of a gradient in updates; None for modes without staleness."""
    largest_age: int | None


@dataclass(frozen=True)
class SyncCell:
    """A mode with a fault, and its runs that have ended."""

    mode: str
    fault: str
    runs: tuple[SyncRun, ...]
    impossible: str = ""
    """Why the mode cannot run; "" if it can."""

    def values(self, of: Callable[[SyncRun], float | None]) -> list[float]:
        """Return the values that `of` gives for the runs, without those that are None."""
        return [value for run in self.runs if (value := of(run)) is not None]

    @property
    def test(self) -> list[float]:
        """Test accuracies of the runs."""
        return self.values(lambda each: each.run.test)

    @property
    def speeds(self) -> list[float]:
        """Images per second of the runs."""
        return self.values(lambda each: each.images_per_second)

    @property
    def seconds(self) -> list[float]:
        """Seconds of training to the goal, of the runs that reached it."""
        return self.values(lambda each: each.run.reached.seconds if each.run.reached else None)

    @property
    def without(self) -> str:
        """Why there are no figures."""
        kinds = [each.run.status for each in self.runs if each.run.test is None]
        return "not available" if self.impossible else kinds[0] if kinds else "-"


@dataclass(frozen=True)
class SyncTable:
    """All cells of a sync study."""

    grid: SyncGrid
    results: Results

    @cached_property
    def cells(self) -> dict[tuple[str, str], SyncCell]:
        """Cells by fault and mode."""
        return {
            (fault, mode): self._cell(mode, fault)
            for fault in self.grid.faults
            for mode in self.grid.modes
        }

    def _cell(self, mode: str, fault: str) -> SyncCell:
        reason = self.grid.impossible.get(mode, "")
        if reason:
            return SyncCell(mode, fault, (), reason)
        names = [self.grid.trial(mode, fault, seed).name for seed in range(self.grid.seeds)]
        ended = [self.results[name] for name in names if name in self.results]
        return SyncCell(mode, fault, tuple(map(self._run, ended)))

    def _run(self, outcome: Outcome) -> SyncRun:
        grid, sync = self.grid, recorded_sync(outcome.record)
        return SyncRun(
            figures(outcome, grid.batch, grid.goal),
            images_per_second(outcome.record),
            None if sync is None else sync.effective_age,
            None if sync is None else sync.largest_age,
        )

    def baseline(self, fault: str) -> SyncCell:
        """Return the cell that the modes of a fault are compared with."""
        first = SYNCHRONOUS if SYNCHRONOUS in self.grid.modes else self.grid.modes[0]
        return self.cells[fault, first]

    def draw(self, file: Path) -> None:
        """Write the plots of accuracy against throughput, and of time to the goal, to `file`."""
        from allstep.study.sync.mode_plots import draw

        draw(self, file)

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {"parties": self.grid.parties, "cells": [asdict(each) for each in self._all()]}

    def _all(self) -> list[SyncCell]:
        return list(self.cells.values())

    def markdown(self) -> str:
        """Return the whole page."""
        grid = self.grid
        parts = [
            f"# {grid.recipe}: {grid.parties} parties by `sync`",
            (
                f"Test accuracy in % after {grid.epochs} epochs and images/s of all workers; mean ±"
                " std over seeds, where there are several. Staleness: mean and largest age of a"
                " gradient, in updates of other parties."
            ),
        ]
        for fault in grid.faults:
            parts += [_title(fault), self._by_mode(fault)]
        if grid.impossible:
            lines = [f"- {mode}: {reason}" for mode, reason in grid.impossible.items()]
            parts += ["## Not available", "\n".join(lines)]
        return "\n\n".join(parts) + "\n"

    def _by_mode(self, fault: str) -> str:
        goal = self.grid.goal
        head = ["mode", "accuracy", "points", "images/s", "speed"]
        head += [] if goal is None else [f"seconds to {goal:.0%}", "time"]
        rows = [self._row(self.cells[fault, mode]) for mode in self.grid.modes]
        return table([*head, "staleness"], rows)

    def _row(self, cell: SyncCell) -> list[str]:
        base = self.baseline(cell.fault)
        points = _compared(cell.test, base.test, lambda a, b: f"{100 * (a - b):+.2f}")
        speed = _compared(cell.speeds, base.speeds, lambda a, b: f"{a / b:.2f}x")
        row = [cell.mode, _shown(cell.test, ".2f", 100) or cell.without, points]
        row += [_shown(cell.speeds, ",.0f") or "-", speed]
        if self.grid.goal is not None:
            time = _compared(cell.seconds, base.seconds, lambda a, b: f"{a / b:.2f}x")
            row += [self._to_goal(cell), time]
        ages = cell.values(lambda each: each.staleness)
        largest = cell.values(lambda each: each.largest_age)
        return [*row, f"{fmean(ages):.2f}, {max(largest):.0f}" if ages else "-"]

    def _to_goal(self, cell: SyncCell) -> str:
        missing = len(cell.runs) - len(cell.seconds)
        found = _shown(cell.seconds, ".1f") or ("not reached" if cell.runs else "-")
        return f"{found} ({missing} of {len(cell.runs)} not)" if cell.seconds and missing else found


def images_per_second(record: RunRecord) -> float | None:
    """Return the throughput of a run; None if its record has too few lines.

    The first line includes imports and first allocations.
    """
    lines = kept(record.steps)
    if len(lines) < 2:
        return None
    spent = sum(number(line, "seconds") or 0.0 for line in lines[1:])
    samples = float(lines[-1]["samples"] - lines[0]["samples"])
    return samples / spent if spent > 0 else None


def _title(fault: str) -> str:
    return "## Without faults" if fault == NO_FAULT else f"## With `{fault}`"


def _shown(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Return mean and std as text; "" without values."""
    if not values:
        return ""
    spread = f" ± {stdev(values) * scale:{form}}" if len(values) > 1 else ""
    return f"{fmean(values) * scale:{form}}{spread}"


def _compared(
    values: Sequence[float], base: Sequence[float], shown: Callable[[float, float], str]
) -> str:
    """Return means compared with those of the baseline; "-" without one."""
    if not values or not base or fmean(base) == 0:
        return "-"
    return shown(fmean(values), fmean(base))
