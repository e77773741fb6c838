"""What `allstep bench step` found: how fast ranks train together, beside as many copies that do not
know of each other.

Speeds are shares of the independent copies' speed in the turn beside: 95% means that one part in
twenty of the time is lost to working together. What is lost is then looked for, in a turn that does
not count:

=========
====================================================================================================================
waiting    for the other ranks, in a collective moving     copying gradients into and out of shared
memory adding     the sums themselves updating   the optimizer's own step on the weights; the
independent copies have it too, and share_weights gives each rank a part =========
====================================================================================================================

They are means over the ranks. What DDP does it does in part while it still computes, so its parts
are not all lost. Gloo does not say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from allstep.bench.result import Missing, absences, document, save_plot, table_of
from allstep.errors import ConfigError

ALONE, GLOO, DDP = "independent copies", "DDP on Gloo", "DDP on allstep"
OPTIMIZER, SHARED = "DistributedOptimizer", "share_weights"
PARTS = ("waiting", "moving", "adding", "updating")
TARGET_RANKS = 2


@dataclass(frozen=True)
class Task:
    """What is trained: a model on images of this shape, so many of them at a step of each rank.
    targets: shares of ALONE's speed."""

    batch: int
    shape: tuple[int, int, int]
    num_classes: int
    num_parameters: int
    targets: Mapping[str, float]


TASKS: Mapping[str, Task] = {
    "alexnet": Task(32, (3, 224, 224), 1000, 61_100_840, {OPTIMIZER: 0.95, SHARED: 0.985}),
    "resnet18": Task(64, (3, 32, 32), 10, 11_173_962, {OPTIMIZER: 0.97, SHARED: 0.97}),
    "small-cnn": Task(32, (1, 28, 28), 10, 805_576, {OPTIMIZER: 0.91, SHARED: 0.91}),
}


@dataclass(frozen=True)
class StepRow:
    """One contender.

    seconds: of each turn, on its slowest rank. speeds: of each turn, as a share of the independent
    copies' in the turn beside. losses: of each step from the first on, the mean over the ranks.
    nbytes: memory that a rank needs for it, with weights, gradients and optimizer; shared memory
    counts once for all who share it, and what two contenders have in common (the engine of
    `allstep.torch`, some 20 MB) with the first of them. parts: seconds of a step.
    """

    name: str
    seconds: Sequence[float]
    speeds: Sequence[float]
    losses: Sequence[float]
    nbytes: float
    parts: Mapping[str, float]

    @property
    def speed(self) -> float:
        return median(self.speeds)


@dataclass(frozen=True)
class StepResult:
    """All rows, in the order of the table. steps: of a turn; batch: images of a rank at a step."""

    model: str
    num_ranks: int
    batch: int
    steps: int
    rows: Sequence[StepRow]
    missing: Sequence[Missing]

    @property
    def targets(self) -> Mapping[str, float]:
        """Empty where nothing is promised."""
        task = TASKS[self.model]
        return task.targets if (self.num_ranks, self.batch) == (TARGET_RANKS, task.batch) else {}

    def met(self, row: StepRow) -> bool | None:
        """Whether the row is as fast as we promise; None where we promise nothing."""
        return row.speed >= self.targets[row.name] if row.name in self.targets else None

    def images_per_second(self, row: StepRow) -> float:
        return self.num_ranks * self.batch * self.steps / median(row.seconds)

    def step_seconds(self, row: StepRow) -> float:
        return median(row.seconds) / self.steps

    def lost(self, row: StepRow) -> float:
        """Seconds of a step beyond what the independent copies need."""
        pairs = zip(row.seconds, row.speeds, strict=True)
        return median(seconds * (1 - speed) for seconds, speed in pairs) / self.steps

    def table(self) -> Group:
        """For people."""
        title = (
            f"{self.model}, {self.num_ranks} ranks with {self.batch} images each, turns of"
            f" {self.steps} steps"
        )
        return Group(title, self._speeds(), self._parts())

    def _speeds(self) -> Table:
        table = table_of("", "images/s", "speed", "min", "max", "target", "", "MB/rank")
        for row in self.rows:
            target = self.targets.get(row.name)
            verdict = {True: "met", False: "not met", None: ""}[self.met(row)]
            shares = [
                f"{100 * share:.1f}%" for share in (row.speed, min(row.speeds), max(row.speeds))
            ]
            wanted = "-" if target is None else f"{100 * target:g}%"
            images = f"{self.images_per_second(row):.1f}"
            table.add_row(
                row.name, images, *shares, wanted, verdict, f"{row.nbytes / (1 << 20):.0f}"
            )
        return table

    def _parts(self) -> Table:
        table = table_of("ms of a step", "all", "lost", *PARTS)
        for row in self.rows:
            figures = [
                self.step_seconds(row),
                self.lost(row),
                *(row.parts.get(part) for part in PARTS),
            ]
            table.add_row(
                row.name, *("-" if figure is None else f"{1e3 * figure:.2f}" for figure in figures)
            )
        return table

    def absences(self) -> list[str]:
        """A line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Every figure of the table, the seconds behind it and the machine."""
        return document("step", [self._as_json(row) for row in self.rows], self.missing)

    def _as_json(self, row: StepRow) -> dict[str, Any]:
        return {
            "name": row.name,
            "model": self.model,
            "ranks": self.num_ranks,
            "batch": self.batch,
            "steps": self.steps,
            "seconds": list(row.seconds),
            "images_per_second": self.images_per_second(row),
            "speeds": list(row.speeds),
            "speed": row.speed,
            "min": min(row.speeds),
            "max": max(row.speeds),
            "target": self.targets.get(row.name),
            "met": self.met(row),
            "bytes": row.nbytes,
            "lost": self.lost(row),
            "parts": dict(row.parts),
            "losses": list(row.losses),
        }

    def plot(self, file: Path) -> None:
        """Bars of the speeds, with a line from the slowest turn to the quickest, and a mark where
        the target is."""
        from matplotlib.figure import Figure  # takes a while to import

        size = (8, 0.6 * len(self.rows) + 1.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        around = [
            (100 * (row.speed - min(row.speeds)), 100 * (max(row.speeds) - row.speed))
            for row in self.rows
        ]
        names, speeds = [row.name for row in self.rows], [100 * row.speed for row in self.rows]
        axes.barh(names, speeds, xerr=list(zip(*around, strict=True)), capsize=3)
        wanted = {
            names.index(name): 100 * target
            for name, target in self.targets.items()
            if name in names
        }
        axes.vlines(
            list(wanted.values()),
            [at - 0.4 for at in wanted],
            [at + 0.4 for at in wanted],
            colors="C3",
        )
        axes.invert_yaxis()
        axes.set_xlabel(
            "percent of the independent copies' speed: median, slowest and quickest turn; target"
            " in red"
        )
        axes.set_title(f"{self.model}, {self.num_ranks} ranks with {self.batch} images each")
        save_plot(figure, file)


def task_of(model: str) -> Task:
    if model not in TASKS:
        raise ConfigError(
            f"--model {model!r}: there is no such net; choose one of {', '.join(TASKS)}"
        )
    return TASKS[model]
