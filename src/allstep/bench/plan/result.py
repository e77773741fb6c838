"""Results of `allstep bench plan`: predicted and measured seconds of a step, by configuration.

A row has a verdict only where the ranks' own CPU time is at most `MOST_CPU` of all cores. Above,
ranks wait for cores, which the model of sleeping layers excludes; the row is reported without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from allstep.bench.plan.configurations import CONFIGURATIONS, Configuration
from allstep.bench.result import document, save_plot
from allstep.console.rich_table import figure_columns

MOST_CPU = 0.3
"""Fraction of all cores that the ranks may use for a verdict."""
EACH, MEDIAN = 0.10, 0.05
"""Targets: largest error of a configuration, and median of all."""


@dataclass(frozen=True)
class PlanRow:
    """One configuration.

    `predicted` counts the burst of the link, `without_burst` does not. `seconds` are those of each
    measured step, `cpu` the CPU time of all ranks as a fraction of all cores.
    """

    configuration: Configuration
    predicted: float
    without_burst: float
    seconds: Sequence[float]
    cpu: float

    @property
    def measured(self) -> float:
        """Seconds of the median step."""
        return median(self.seconds)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def is_valid(self) -> bool:
        """Whether the ranks had enough of the cores."""
        return self.cpu <= MOST_CPU

    @property
    def met(self) -> bool | None:
        """Whether the error is within the target; None without a verdict."""
        if not (self.is_valid and self.configuration.judged):
            return None
        return abs(self.error) <= EACH

    @property
    def verdict(self) -> str:
        """The verdict as a text."""
        if not self.is_valid:
            return f"none: CPU above {MOST_CPU:.0%}"
        if not self.configuration.judged:
            return "none: no target"
        return "met" if self.met else "not met"


@dataclass(frozen=True)
class PlanResult:
    """All rows, in the order of the table.

    `message` is the measured seconds of a message of few bytes, `steps` the measured steps of each
    configuration.
    """

    rows: tuple[PlanRow, ...]
    message: float
    steps: int
    cores: int

    @property
    def median_error(self) -> float | None:
        """The median of the absolute errors of the rows with a verdict; None if there are none."""
        errors = [abs(row.error) for row in self.rows if row.met is not None]
        return median(errors) if errors else None

    def table(self) -> Group:
        """Return the table for the console."""
        title = (
            f"A step of workers whose layers sleep, {self.steps} steps each, on {self.cores} cores;"
            f" a message takes {1e6 * self.message:.0f} us; hosts x workers, link in Mbit/s,"
            " burst in KB"
        )
        return Group(title, self._table(), self.summary())

    def _table(self) -> Table:
        setting = ["Mbit", "burst", "buckets", "slow"]
        heads = [*setting, "predicted ms", "measured ms", "error", "CPU"]
        table = figure_columns(["hosts"], heads)
        table.add_column("verdict", no_wrap=True)
        for row in self.rows:
            each = row.configuration
            table.add_row(
                f"{each.hosts} x {each.per_host}",
                str(each.mbit),
                str(each.burst >> 10),
                f"{each.buckets}{'' if each.layers == CONFIGURATIONS[0].layers else ' unequal'}",
                "" if each.slow == 1.0 else f"{each.slow:g}",
                f"{1e3 * row.predicted:.0f}",
                f"{1e3 * row.measured:.0f}",
                f"{row.error:+.1%}",
                f"{row.cpu:.0%}",
                {True: "met", False: "not met", None: "none"}[row.met],
            )
        return table

    def summary(self) -> str:
        """Return the median error of the rows with a verdict, and what is missing."""
        judged = [row for row in self.rows if row.configuration.judged]
        valid = [row for row in judged if row.is_valid]
        parts = [f"{len(valid)} of {len(judged)} configurations have a verdict"]
        if self.median_error is not None:
            verdict = "met" if self.median_error <= MEDIAN else "not met"
            parts.append(
                f"median error {self.median_error:.1%} (target {MEDIAN:.0%}: {verdict}), largest"
                f" {max(abs(row.error) for row in valid):.1%}"
            )
        if len(valid) < len(judged):
            parts.append("repeat the others when nothing else runs on this machine")
        return "; ".join(parts)

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table: there are none."""
        return []

    def to_json(self) -> str:
        """Return every figure of the table, the seconds behind it and the machine, as JSON."""
        return document("plan", [self._as_json(row) for row in self.rows], ())

    def _as_json(self, row: PlanRow) -> dict[str, Any]:
        each = row.configuration
        return {
            "name": each.name,
            "hosts": each.hosts,
            "workers_per_host": each.per_host,
            "mbit": each.mbit,
            "burst": each.burst,
            "bucket_limit": each.limit,
            "layers": [list(layer) for layer in each.layers],
            "slow": each.slow,
            "message": self.message,
            "predicted": row.predicted,
            "predicted_without_burst": row.without_burst,
            "measured": row.measured,
            "seconds": list(row.seconds),
            "error": row.error,
            "cpu": row.cpu,
            "verdict": row.verdict,
            "met": row.met,
        }

    def plot(self, file: Path) -> None:
        """Plot predicted and measured steps of each configuration next to each other."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(9, 0.6 * len(self.rows) + 1.4), layout="constrained")
        axes = figure.subplots()
        names = [row.configuration.name.replace(" KB, ", " KB\n") for row in self.rows]
        predicted, measured = (
            [1e3 * getattr(row, kind) for row in self.rows] for kind in ("predicted", "measured")
        )
        around = [
            (1e3 * (row.measured - min(row.seconds)), 1e3 * (max(row.seconds) - row.measured))
            for row in self.rows
        ]
        places = range(len(self.rows))
        axes.barh([at - 0.2 for at in places], predicted, 0.38, label="predicted")
        axes.barh(
            [at + 0.2 for at in places],
            measured,
            0.38,
            xerr=list(zip(*around, strict=True)),
            capsize=2,
            label="measured: median, fastest and slowest step",
        )
        axes.set_yticks(list(places), names)
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step")
        axes.set_title("allstep bench plan")
        figure.legend(fontsize="small", loc="outside lower center", ncols=2)
        save_plot(figure, file)
