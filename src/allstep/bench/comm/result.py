"""Results of `allstep bench comm`: seconds of one allreduce by ranks, size and contender.

They are compared with the targets of allstep. Ratios are speeds: 3 times Gloo means a third of
Gloo's time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from rich.table import Table

from allstep.bench.result import Missing, Row, absences, document, save_plot
from allstep.console.rich_table import figure_columns
from allstep.errors import ConfigError

KB, MB = 1 << 10, 1 << 20
SHARED, PRIVATE, GLOO, OPEN_MPI = "allstep, shared", "allstep, private", "Gloo", "Open MPI"
# Contents of the caches when a call begins: the result of the last call, values that the rank has
# just written, or nothing of its tensor.
CACHES = HOT, WRITTEN, COLD = "hot", "written", "cold"
REFERENCES = (GLOO, OPEN_MPI)
# First in every table; the others have no target.
FOREMOST = (SHARED, PRIVATE, GLOO, OPEN_MPI)


@dataclass(frozen=True)
class Target:
    """Minimum speeds for `num_ranks` ranks and tensors of `least` to `most` bytes.

    `ratios` maps a contender of allstep to a factor for each reference.
    """

    num_ranks: int
    least: int
    most: int
    ratios: Mapping[str, Mapping[str, float]]
    caches: tuple[str, ...] = (HOT,)


TARGETS = (
    Target(2, 4 * KB, 64 * KB, {SHARED: {GLOO: 20}, PRIVATE: {GLOO: 12}}),
    Target(2, MB, MB, {SHARED: {OPEN_MPI: 3}, PRIVATE: {GLOO: 3, OPEN_MPI: 0.6}}),
    Target(2, 8 * MB, 8 * MB, {SHARED: {OPEN_MPI: 1.6}, PRIVATE: {GLOO: 3, OPEN_MPI: 0.5}}),
    Target(
        2, 32 * MB, 256 * MB, {SHARED: {OPEN_MPI: 3, GLOO: 6}, PRIVATE: {OPEN_MPI: 1.4, GLOO: 2.5}}
    ),
    Target(4, MB, 1 << 62, {SHARED: {OPEN_MPI: 1.5}, PRIVATE: {GLOO: 1.6}}),
    Target(2, MB, MB, {SHARED: {OPEN_MPI: 1}, PRIVATE: {OPEN_MPI: 0.6}}, (WRITTEN, COLD)),
)


@dataclass(frozen=True)
class CommRow:
    """One contender at one size.

    `row.seconds` are the median calls of each repetition on its slowest rank; `mean` is over all
    calls.
    """

    num_ranks: int
    nbytes: int
    row: Row
    mean: float
    caches: str = HOT

    @property
    def targets(self) -> Mapping[str, float]:
        """Return the minimum speed compared with each reference; empty if there is no target."""
        for target in TARGETS:
            fits = target.num_ranks == self.num_ranks and target.least <= self.nbytes <= target.most
            if fits and self.caches in target.caches:
                return target.ratios.get(self.row.name, {})
        return {}


@dataclass(frozen=True)
class CommResult:
    """All rows, in the order of the table."""

    rows: tuple[CommRow, ...]
    missing: tuple[Missing, ...]

    def speed(self, row: CommRow, reference: str) -> float | None:
        """Return the speed compared with the reference, or None if that was not measured."""
        for other in self.rows:
            same_sum = (other.num_ranks, other.nbytes) == (row.num_ranks, row.nbytes)
            if same_sum and other.row.name == reference:
                return other.row.median / row.row.median
        return None

    def met(self, row: CommRow) -> bool | None:
        """Return whether the row meets its target.

        None means that there is no target, or a reference is missing.
        """
        speeds = [(self.speed(row, reference), least) for reference, least in row.targets.items()]
        if any(speed is not None and speed < least for speed, least in speeds):
            return False
        return True if speeds and all(speed is not None for speed, _ in speeds) else None

    def unmet(self) -> list[str]:
        """Return a line for each row that does not meet its target."""
        lines = []
        for row in self.rows:
            if self.met(row) is False:
                targets = [f"{least:g}x {reference}" for reference, least in row.targets.items()]
                place = f"{row.num_ranks} ranks, {show_size(row.nbytes)}, {row.row.name}"
                lines.append(f"not met: {place}: {' and '.join(targets)}")
        return lines

    def table(self) -> Table:
        """Return the table for the console."""
        speeds = [f"x {reference}" for reference in REFERENCES]
        table = figure_columns(["", ""], ["median", "min", "max", *speeds])
        table.caption, table.caption_justify = "\n".join(self.unmet()), "left"
        table.add_column("target", no_wrap=True)
        for num_ranks, rows in groupby(self.rows, lambda row: row.num_ranks):
            table.add_row(f"{num_ranks} ranks")
            for nbytes, contenders in groupby(rows, lambda row: row.nbytes):
                for number, row in enumerate(contenders):
                    table.add_row(show_size(nbytes) if number == 0 else "", *self._cells(row))
                table.add_section()
        return table

    def _cells(self, row: CommRow) -> list[str]:
        seconds = [
            show_time(value)
            for value in (row.row.median, min(row.row.seconds), max(row.row.seconds))
        ]
        speeds = [self.speed(row, reference) for reference in REFERENCES]
        verdict = {True: "met", False: "not met", None: "-"}[self.met(row)]
        return [
            row.row.name,
            *seconds,
            *("-" if speed is None else f"{speed:.2f}" for speed in speeds),
            verdict,
        ]

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Return every figure of the table, the seconds behind it and the machine, as JSON."""
        return document("comm", [self._as_json(row) for row in self.rows], self.missing)

    def _as_json(self, row: CommRow) -> dict[str, Any]:
        speeds = {reference: self.speed(row, reference) for reference in REFERENCES}
        seconds = row.row.seconds
        return {
            "ranks": row.num_ranks,
            "bytes": row.nbytes,
            "caches": row.caches,
            "name": row.row.name,
            "seconds": list(seconds),
            "median": row.row.median,
            "min": min(seconds),
            "max": max(seconds),
            "mean": row.mean,
            "speed": speeds,
            "target": dict(row.targets),
            "met": self.met(row),
        }

    def plot(self, file: Path) -> None:
        """Plot time over size on logarithmic axes, one panel per number of ranks.

        Each contender is a line.
        """
        from matplotlib.figure import Figure  # slow to import

        numbers = sorted({row.num_ranks for row in self.rows})
        figure = Figure(figsize=(6 * len(numbers), 4.5), layout="constrained")
        panels = figure.subplots(1, len(numbers), squeeze=False, sharey=True)[0]
        for axes, num_ranks in zip(panels, numbers, strict=True):
            self._draw(axes, num_ranks)
        panels[0].set_ylabel("seconds per allreduce")
        save_plot(figure, file)

    def _draw(self, axes: Any, num_ranks: int) -> None:
        """Draw one panel.

        The foremost contenders have colors, with their range as a band; the others are thin grey
        lines with different dashes.
        """
        ours = [row for row in self.rows if row.num_ranks == num_ranks]
        dashes = cycle(("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))))
        for name in dict.fromkeys(row.row.name for row in ours):
            rows = [row for row in ours if row.row.name == name]
            sizes, medians = [row.nbytes for row in rows], [row.row.median for row in rows]
            if name in FOREMOST:
                colour = f"C{FOREMOST.index(name)}"
                axes.plot(sizes, medians, color=colour, marker="o", markersize=4, label=name)
                low, high = ([end(row.row.seconds) for row in rows] for end in (min, max))
                axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            else:
                style = {"color": "0.5", "linewidth": 0.8, "linestyle": next(dashes), "zorder": 1}
                axes.plot(sizes, medians, label=name, **style)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes")
        axes.set_title(f"{num_ranks} ranks")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of each size in a list such as 4KB,64KB,1MB; a KB is 1,024 bytes."""
    return [_parse_size(size.strip()) for size in text.split(",")]


def _parse_size(text: str) -> int:
    size = text.upper().removesuffix("B")
    number = size.rstrip("KMG")
    unit = {"": 1, "K": KB, "M": MB, "G": KB * MB}.get(size[len(number) :], 0)
    nbytes = int(number) * unit if number.isdecimal() else 0
    if nbytes < 4 or nbytes % 4:
        raise ConfigError(
            f"--sizes: {text!r} is not a size such as 64KB or 1MB, in whole numbers of 4 bytes"
        )
    return nbytes


def parse_caches(text: str) -> str:
    """Return `text` if it is one of `CACHES`, else raise ConfigError."""
    if text not in CACHES:
        raise ConfigError(f"--caches: {text!r} is not one of {', '.join(CACHES)}")
    return text


def parse_ranks(text: str) -> list[int]:
    """Return the numbers in a list such as 2,4."""
    numbers = [number.strip() for number in text.split(",")]
    wrong = [number for number in numbers if not number.isdecimal() or int(number) < 2]
    if wrong:
        raise ConfigError(
            f"--ranks: {wrong[0]!r} is not a number of ranks; a sum needs two at least"
        )
    return [int(number) for number in numbers]


def show_size(nbytes: int) -> str:
    """Return a size in the largest unit that leaves a whole number."""
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def show_time(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
