"""Results of `allstep bench data`: images per second of each contender and each stage of allstep.

Ratios are taken in each round: allstep's speed divided by the peer's in the same round; the result
is the median. `PROMISES` holds the targets, for images of 224x224 on two threads. Peers read the
originals; allstep reads the originals, images packed with the longer side cut to 400, or decoded
ones of 256.

The stages are measured on one thread, one after the other: `read` reads a record from its file
and checks it, `decode` decodes the whole image, `augment` crops, resizes and flips pixels,
`collate` copies them into a batch, `one image` is the real work of a loader's thread (it
decodes only what the crop needs, directly into the batch). The slowest of the first four is the
bottleneck.

The loader's speed is also shown as a share of the speed of the same number of plain threads, and
plain processes, with the same work in the same round (`ceiling`), and of N times one thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from allstep.bench.data.reader import OURS, PACKED, RAW
from allstep.bench.result import Missing, absences, document, save_plot
from allstep.console.rich_table import figure_columns

STAGES = ("read", "decode", "augment", "collate")
WHOLE = "one image"
PROMISES: Mapping[tuple[str, str], float] = {
    (OURS, "DataLoader, Pillow"): 1.6,
    (OURS, "DataLoader, OpenCV"): 1.1,
    (OURS, "WebDataset, Pillow"): 1.7,
    (OURS, "DALI"): 1.4,
    (OURS, "tf.data"): 1.1,
    (PACKED, "tf.data"): 2.2,
    (RAW, "tf.data"): 8.0,
}
KEPT: Mapping[str, float] = {OURS: 0.9, PACKED: 0.9, RAW: 0.75}
"""Targets: minimum share of the speed of plain threads and of plain processes."""
PROMISED_SIZE, PROMISED_THREADS = 224, 2


@dataclass(frozen=True)
class DataRow:
    """One contender.

    `speeds` are images per second in each round, `first` is the seconds to the first batch,
    `nbytes` the memory it allocated.
    """

    name: str
    speeds: Sequence[float]
    first: float
    nbytes: float

    @property
    def speed(self) -> float:
        return median(self.speeds)


@dataclass(frozen=True)
class DataResult:
    """All rows, in the order of the table.

    `stages` are images per second on one thread, for each of allstep's formats.
    """

    where: str
    num_samples: int
    size: int
    batch: int
    num_threads: int
    rows: Sequence[DataRow]
    stages: Mapping[str, Mapping[str, float]]
    missing: Sequence[Missing]
    alone: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """Images per second of plain threads and processes in each round, by allstep's formats."""

    def ratios(self, ours: DataRow, peer: DataRow) -> list[float]:
        """Return allstep's speed divided by the peer's, for each round."""
        return _ratios(ours.speeds, peer.speeds)

    def promise(self, ours: str, peer: str) -> float | None:
        """Return the target for this pair, as a multiple of the peer's speed, or None."""
        return PROMISES.get((ours, peer)) if self._is_promised else None

    @property
    def _is_promised(self) -> bool:
        return (self.size, self.num_threads) == (PROMISED_SIZE, PROMISED_THREADS)

    @property
    def ours(self) -> list[DataRow]:
        return [row for row in self.rows if row.name in (OURS, PACKED, RAW)]

    def bottleneck(self, name: str) -> str:
        """Return the stage with the fewest images per second."""
        return min(STAGES, key=lambda stage: self.stages[name][stage])

    def kept(self, row: DataRow) -> dict[str, float]:
        """Return the loader's speed as shares of plain threads, processes and N single threads."""
        alone = {
            kind: median(_ratios(row.speeds, speeds))
            for kind, speeds in self.alone.get(row.name, {}).items()
        }
        return {
            **alone,
            "times one thread": row.speed / (self.num_threads * self.stages[row.name][WHOLE]),
        }

    def table(self) -> Group:
        """Return the tables for the console."""
        each = f"{self.num_samples} images, {self.size}x{self.size} out, batch {self.batch}"
        title = f"{self.where}: {each}, {self.num_threads} threads or processes"
        lines = [self._summary(row) for row in self.ours]
        return Group(title, self._speeds(), self._ratios(), self._stages(), *lines)

    def _summary(self, row: DataRow) -> str:
        stage = self.bottleneck(row.name)
        shares = ", ".join(
            self._share(row.name, kind, share) for kind, share in self.kept(row).items()
        )
        return f"{row.name}: {stage}-bound; the loader delivers {shares} alone"

    def _share(self, name: str, kind: str, share: float) -> str:
        promise = KEPT[name]
        judged = self._is_promised and kind in self.alone.get(name, {})
        verdict = f" ({'met' if share >= promise else 'not met'}: {promise:.0%})" if judged else ""
        return f"{share:.0%} of {self.num_threads} {kind}{verdict}"

    def _speeds(self) -> Table:
        table = figure_columns([""], ["images/s", "min", "max", "first batch s", "MB"])
        for row in self.rows:
            figures = [f"{value:,.0f}" for value in (row.speed, min(row.speeds), max(row.speeds))]
            table.add_row(row.name, *figures, f"{row.first:.2f}", f"{row.nbytes / (1 << 20):.0f}")
        return table

    def _ratios(self) -> Table:
        table = figure_columns(["times as fast as"], [*(row.name for row in self.ours)])
        for row in self.rows:
            if row not in self.ours:
                table.add_row(row.name, *(self._ratio(ours, row) for ours in self.ours))
        return table

    def _ratio(self, ours: DataRow, peer: DataRow) -> str:
        ratio, promise = median(self.ratios(ours, peer)), self.promise(ours.name, peer.name)
        if promise is None:
            return f"{ratio:.2f}"
        return f"{ratio:.2f} ({'met' if ratio >= promise else 'not met'}: {promise:g})"

    def _stages(self) -> Table:
        table = figure_columns(["images/s on one thread"], [*STAGES, WHOLE])
        for name, speeds in self.stages.items():
            table.add_row(name, *(f"{speeds[stage]:,.0f}" for stage in (*STAGES, WHOLE)))
        return table

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Return every figure of the table, the speeds behind it and the machine, as JSON."""
        return document("data", [self._as_json(row) for row in self.rows], self.missing)

    def _as_json(self, row: DataRow) -> dict[str, Any]:
        ratios = {ours.name: self.ratios(ours, row) for ours in self.ours if row not in self.ours}
        return {
            "name": row.name,
            "samples": self.num_samples,
            "size": self.size,
            "batch": self.batch,
            "threads": self.num_threads,
            "speeds": list(row.speeds),
            "speed": row.speed,
            "first": row.first,
            "bytes": row.nbytes,
            "ratios": ratios,
            "promises": {name: self.promise(name, row.name) for name in ratios},
            "stages": dict(self.stages.get(row.name, {})),
            "alone": {kind: list(speeds) for kind, speeds in self.alone.get(row.name, {}).items()},
            "kept": self.kept(row) if row in self.ours else {},
        }

    def plot(self, file: Path) -> None:
        """Plot bars of the speeds, with a line from the slowest turn to the fastest."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(8, 0.5 * len(self.rows) + 1.4), layout="constrained")
        axes = figure.subplots()
        around = [(row.speed - min(row.speeds), max(row.speeds) - row.speed) for row in self.rows]
        colours = ["C0" if row in self.ours else "C7" for row in self.rows]
        names, speeds = [row.name for row in self.rows], [row.speed for row in self.rows]
        axes.barh(names, speeds, xerr=list(zip(*around, strict=True)), capsize=3, color=colours)
        axes.invert_yaxis()
        axes.set_xlabel("images a second: median, slowest and quickest turn")
        workers = f"{self.num_threads} threads or processes"
        axes.set_title(f"{self.size}x{self.size} out, batch {self.batch}, {workers}")
        save_plot(figure, file)


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]
