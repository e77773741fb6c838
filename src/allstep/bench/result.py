"""Results of a benchmark: seconds by contender, and the contenders that could not be measured."""

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from allstep._version import __version__
from allstep.console.rich_table import figure_columns
from allstep.errors import ConfigError
from allstep.machine import allowed_cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Row:
    """One contender and its seconds in each repetition."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class Missing:
    """A contender that could not be measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Result:
    """The rows of a benchmark in the order of its table.

    `references` maps a short name to the name of the row that ratios are taken to.
    """

    benchmark: str
    rows: tuple[Row, ...]
    missing: tuple[Missing, ...]
    references: Mapping[str, str]

    def ratio(self, row: Row, reference: str) -> float | None:
        """Return the time as a multiple of the reference's, or None if that was not measured."""
        found = next(
            (other for other in self.rows if other.name == self.references[reference]), None
        )
        return row.median / found.median if found else None

    def table(self) -> Table:
        """Return the table for the console: seconds, and ratios to the references."""
        ratios_to = [f"/{reference}" for reference in self.references]
        table = figure_columns([""], ["median s", "min", "max", *ratios_to])
        for row in self.rows:
            ratios = [self.ratio(row, reference) for reference in self.references]
            seconds = [f"{value:.2f}" for value in (row.median, min(row.seconds), max(row.seconds))]
            table.add_row(
                row.name, *seconds, *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            )
        return table

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Return every figure of the table, the seconds behind it and the machine, as JSON."""
        return document(self.benchmark, [self._as_json(row) for row in self.rows], self.missing)

    def _as_json(self, row: Row) -> dict[str, Any]:
        ratios = {reference: self.ratio(row, reference) for reference in self.references}
        figures = {"median": row.median, "min": min(row.seconds), "max": max(row.seconds)}
        return {"name": row.name, "seconds": list(row.seconds), **figures, "ratio": ratios}

    def plot(self, file: Path) -> None:
        """Plot bars of the medians, with a line from the fastest time to the slowest."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(8, 0.6 * len(self.rows) + 1.2), layout="constrained")
        axes = figure.subplots()
        medians = [row.median for row in self.rows]
        around = [_distances(row) for row in self.rows]
        names = [row.name for row in self.rows]
        axes.barh(names, medians, xerr=list(zip(*around, strict=True)), capsize=3)
        axes.invert_yaxis()
        axes.set_xlabel("seconds: median, quickest and slowest")
        axes.set_title(f"allstep bench {self.benchmark}")
        save_plot(figure, file)


def _distances(row: Row) -> Sequence[float]:
    return row.median - min(row.seconds), max(row.seconds) - row.median


def save_plot(figure: "Figure", file: Path) -> None:
    """Write `figure` to `file`; raise ConfigError if that fails."""
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {file}: {error}") from error


def absences(missing: Iterable[Missing]) -> list[str]:
    """Return a line for each contender that is missing from a table."""
    return [f"missing: {each.name} ({each.reason})" for each in missing]


def document(benchmark: str, rows: list[dict[str, Any]], missing: Iterable[Missing]) -> str:
    """Return the JSON document of a benchmark."""
    whole = {
        "benchmark": benchmark,
        "version": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "rows": rows,
        "missing": [{"name": each.name, "reason": each.reason} for each in missing],
    }
    return json.dumps(whole, indent=2)


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "architecture": platform.machine(),
        "cores": allowed_cores(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
