"""Results of `allstep bench sync`: seconds and CPU time of one push and pull, by size and store.

They are compared with the targets of allstep. Ratios are speeds: 20 times MXNet means a twentieth
of MXNet's time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from allstep.bench.comm.result import KB, MB, show_size, show_time
from allstep.bench.result import Missing, Row, absences, document
from allstep.bench.sync.foreign_stores import MXNET, MXNET_TWO
from allstep.bench.sync.gloo_pairs import GLOO_PAIRS
from allstep.bench.sync.store_rank import STORE, STORE_TWO
from allstep.console.rich_table import figure_columns

REFERENCES = (_MXNET, _GLOO) = ("MXNet", "Gloo")
# Two calls are compared with two calls.
_CALLS = {_MXNET: {STORE_TWO: MXNET_TWO}, _GLOO: dict[str, str]()}
_ONE_CALL = {_MXNET: MXNET, _GLOO: GLOO_PAIRS}
# With two workers: bytes of the key, and how many times the speed of each reference.
TARGETS: Mapping[int, Mapping[str, float]] = {
    4 * KB: {_MXNET: 20, _GLOO: 10},
    MB: {_MXNET: 10, _GLOO: 6},
    32 * MB: {_MXNET: 5, _GLOO: 2},
}


@dataclass(frozen=True)
class SyncRow:
    """One store at one size.

    `row.seconds` are the median calls of each repetition on its slowest worker. CPU times are
    seconds per call, of the worker that calls and of the server.
    """

    nbytes: int
    row: Row
    worker_cpu: float
    server_cpu: float


@dataclass(frozen=True)
class SyncResult:
    """All rows, in the order of the table."""

    num_workers: int
    rows: tuple[SyncRow, ...]
    missing: tuple[Missing, ...]

    def targets(self, row: SyncRow) -> Mapping[str, float]:
        """Return the minimum speed compared with each reference; empty if there is no target."""
        has_one = row.row.name in (STORE, STORE_TWO) and self.num_workers == 2
        return TARGETS.get(row.nbytes, {}) if has_one else {}

    def speed(self, row: SyncRow, reference: str) -> float | None:
        """Return the speed compared with the reference, or None if that was not measured."""
        name = _CALLS[reference].get(row.row.name, _ONE_CALL[reference])
        for other in self.rows:
            if other.nbytes == row.nbytes and other.row.name == name:
                return other.row.median / row.row.median
        return None

    def met(self, row: SyncRow) -> bool | None:
        """Return whether the row meets its target; None without one, or without a reference."""
        speeds = [(self.speed(row, name), least) for name, least in self.targets(row).items()]
        if any(speed is not None and speed < least for speed, least in speeds):
            return False
        return True if speeds and all(speed is not None for speed, _ in speeds) else None

    def unmet(self) -> list[str]:
        """Return a line for each row that does not meet its target."""
        return [
            f"not met: {show_size(row.nbytes)}, {row.row.name}: "
            + " and ".join(f"{least:g}x {name}" for name, least in self.targets(row).items())
            for row in self.rows
            if self.met(row) is False
        ]

    def table(self) -> Table:
        """Return the table for the console."""
        speeds = [f"x {name}" for name in REFERENCES]
        table = figure_columns([""], ["median", "min", "max", "CPU", *speeds])
        table.caption, table.caption_justify = "\n".join(self.unmet()), "left"
        table.add_column("target", no_wrap=True)
        for nbytes, rows in groupby(self.rows, lambda row: row.nbytes):
            table.add_row(show_size(nbytes))
            for row in rows:
                table.add_row(*self._cells(row))
            table.add_section()
        return table

    def _cells(self, row: SyncRow) -> list[str]:
        seconds = row.row.median, min(row.row.seconds), max(row.row.seconds)
        speeds = [self.speed(row, name) for name in REFERENCES]
        verdict = {True: "met", False: "not met", None: "-"}[self.met(row)]
        return [
            row.row.name,
            *map(show_time, seconds),
            show_time(row.worker_cpu + row.server_cpu),
            *("-" if speed is None else f"{speed:.1f}" for speed in speeds),
            verdict,
        ]

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Return every figure of the table, the seconds behind it and the machine, as JSON."""
        return document("sync", [self._as_json(row) for row in self.rows], self.missing)

    def _as_json(self, row: SyncRow) -> dict[str, Any]:
        return {
            "workers": self.num_workers,
            "bytes": row.nbytes,
            "name": row.row.name,
            "seconds": list(row.row.seconds),
            "median": row.row.median,
            "min": min(row.row.seconds),
            "max": max(row.row.seconds),
            "cpu": {"worker": row.worker_cpu, "server": row.server_cpu},
            "speed": {name: self.speed(row, name) for name in REFERENCES},
            "target": dict(self.targets(row)),
            "met": self.met(row),
        }
