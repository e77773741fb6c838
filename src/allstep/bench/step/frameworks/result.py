"""Results of `allstep bench step --framework`: those of `bench step`, with CPU time and the bridge.

The parts of a step are explained in `watching`. The row "bridge alone" is a distributed optimizer
of one rank: gradients leave the framework and return, and nothing is reduced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from allstep.bench.step.frameworks.tasks import BRIDGE
from allstep.bench.step.result import ALONE, StepResult, StepRow
from allstep.console.rich_table import figure_columns

# Parts of a step, with short headings: the table has 80 columns.
PARTS = {
    "waiting": "wait",
    "moving": "move",
    "adding": "add",
    "preparing": "prepare",
    "bridging": "bridge",
}


@dataclass(frozen=True)
class FrameworkResult(StepResult):
    """All rows, in the order of the table."""

    framework: str

    @property
    def targets(self) -> Mapping[str, float]:
        """Return nothing: no speed is promised for these setups."""
        return {}

    def cpu_seconds(self, row: StepRow) -> float | None:
        """Return the CPU time of a step, or None if it was not measured."""
        return median(row.cpu) / self.steps if row.cpu else None

    @property
    def bridge_share(self) -> float | None:
        """Return the CPU time that the bridge adds, as a share of the plain step's.

        It is the median over the rounds, each compared with the independent copies next to it.
        """
        shares = [row.cpu_shares for row in self.rows if row.name == BRIDGE]
        return median(shares[0]) - 1 if shares and shares[0] else None

    def table(self) -> Group:
        """Return the tables for the console."""
        ranks = f"{self.num_ranks} ranks with {self.batch} images each"
        title = f"{self.framework}, {self.model}, {ranks}, turns of {self.steps} steps"
        return Group(title, self._speeds(), self._parts(), *self._bridge())

    def _speeds(self) -> Table:
        table = figure_columns([""], ["images/s", "speed", "min", "max", "CPU ms", "MB/rank"])
        for row in self.rows:
            shares = [
                f"{100 * share:.1f}%" for share in (row.speed, min(row.speeds), max(row.speeds))
            ]
            figures = [_milliseconds(self.cpu_seconds(row)), f"{row.nbytes / (1 << 20):.0f}"]
            table.add_row(row.name, f"{self.images_per_second(row):.1f}", *shares, *figures)
        return table

    def _parts(self) -> Table:
        table = figure_columns(["ms of a step"], ["all", "lost", *PARTS.values()])
        for row in self.rows:
            parts = [row.parts.get(part) for part in PARTS]
            lost = None if row.name == ALONE else self.lost(row)
            table.add_row(row.name, *map(_milliseconds, [self.step_seconds(row), lost, *parts]))
        return table

    def _bridge(self) -> list[str]:
        share = self.bridge_share
        if share is None:
            return []
        (row,) = [row for row in self.rows if row.name == BRIDGE]
        low, high = min(row.cpu_shares) - 1, max(row.cpu_shares) - 1
        return [
            f"the bridge adds {100 * share:.2f}% of CPU time to a step"
            f" ({100 * low:.2f} to {100 * high:.2f})"
        ]

    def _as_json(self, row: StepRow) -> dict[str, Any]:
        return super()._as_json(row) | {
            "framework": self.framework,
            "cpu": list(row.cpu),
            "cpu_shares": list(row.cpu_shares),
        }


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"
