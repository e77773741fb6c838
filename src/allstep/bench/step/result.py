"""Results of `allstep bench step`: the speed of ranks that train together.

Speeds are shares of the independent copies' speed in the neighboring turn: 95% means that 5% of the
time is lost to communication. A separate turn, which does not count, measures where the time goes:

| part | seconds of |
|---|---|
| waiting | waiting for other ranks in a collective |
| moving | copying gradients into and out of shared memory |
| adding | computing the sums |
| updating | the optimizer's step, also in independent copies; share_weights divides it by ranks |

These are means over the ranks. DDP does a part of its communication while it still computes, so its
parts are not lost completely. Gloo does not report parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table

from allstep.bench.result import Missing, absences, document, save_plot
from allstep.console.rich_table import figure_columns
from allstep.errors import ConfigError

ALONE, GLOO, DDP = "independent copies", "DDP on Gloo", "DDP on allstep"
OPTIMIZER, SHARED, PUSHED = "DistributedOptimizer", "share_weights", "sync=async"
PARTS = ("waiting", "moving", "adding", "updating")
TARGET_RANKS = 2


@dataclass(frozen=True)
class Task:
    """A model to train.

    `batch` is the images per rank and step, `shape` that of an image (channels, height, width),
    `targets` the minimum speed of contenders as a share of the independent copies' speed.
    """

    batch: int
    shape: tuple[int, int, int]
    num_classes: int
    num_parameters: int
    targets: Mapping[str, float]


TASKS: Mapping[str, Task] = {
    "alexnet": Task(32, (3, 224, 224), 1000, 61_100_840, {OPTIMIZER: 0.95, SHARED: 0.985}),
    "resnet18": Task(
        64, (3, 32, 32), 10, 11_173_962, {OPTIMIZER: 0.97, SHARED: 0.97, PUSHED: 0.97}
    ),
    "small-cnn": Task(32, (1, 28, 28), 10, 805_576, {OPTIMIZER: 0.91, SHARED: 0.91, PUSHED: 0.91}),
}


@dataclass(frozen=True)
class StepRow:
    """One contender.

    `seconds` of each turn, on its slowest rank. `speeds` of each turn, as a share of the
    independent copies' speed in the neighboring turn. `losses` of each step from the first on, as
    means over the ranks. `nbytes` is the memory that a rank needs for it, with weights, gradients
    and optimizer; shared memory counts once for all ranks that share it, and memory that two
    contenders have in common (the engine of `allstep.torch`, some 20 MB) counts for the first of
    them. `parts` are seconds per step. `cpu` of each turn is the mean over the ranks, `cpu_shares`
    the same as a share of the independent copies'; both are empty if not measured.
    """

    name: str
    seconds: Sequence[float]
    speeds: Sequence[float]
    losses: Sequence[float]
    nbytes: float
    parts: Mapping[str, float]
    cpu: Sequence[float] = ()
    cpu_shares: Sequence[float] = ()

    @property
    def speed(self) -> float:
        return median(self.speeds)


@dataclass(frozen=True)
class StepResult:
    """All rows, in the order of the table.

    `steps` is the number of steps of a turn, `batch` the images per rank and step.
    """

    model: str
    num_ranks: int
    batch: int
    steps: int
    rows: Sequence[StepRow]
    missing: Sequence[Missing]

    @property
    def targets(self) -> Mapping[str, float]:
        """Return the target of each contender; empty if this setup has no targets."""
        task = TASKS[self.model]
        return task.targets if (self.num_ranks, self.batch) == (TARGET_RANKS, task.batch) else {}

    def met(self, row: StepRow) -> bool | None:
        """Return whether the row meets its target, or None if it has none."""
        return row.speed >= self.targets[row.name] if row.name in self.targets else None

    def images_per_second(self, row: StepRow) -> float:
        return self.num_ranks * self.batch * self.steps / median(row.seconds)

    def step_seconds(self, row: StepRow) -> float:
        return median(row.seconds) / self.steps

    def lost(self, row: StepRow) -> float:
        """Return the seconds of a step beyond those of the independent copies."""
        pairs = zip(row.seconds, row.speeds, strict=True)
        return median(seconds * (1 - speed) for seconds, speed in pairs) / self.steps

    def table(self) -> Group:
        """Return the tables for the console."""
        ranks = f"{self.num_ranks} ranks with {self.batch} images each"
        title = f"{self.model}, {ranks}, turns of {self.steps} steps"
        return Group(title, self._speeds(), self._parts())

    def _speeds(self) -> Table:
        table = figure_columns([""], ["images/s", "speed", "min", "max", "target", "", "MB/rank"])
        for row in self.rows:
            target = self.targets.get(row.name)
            verdict = {True: "met", False: "not met", None: ""}[self.met(row)]
            shares = [
                f"{100 * share:.1f}%" for share in (row.speed, min(row.speeds), max(row.speeds))
            ]
            wanted = "-" if target is None else f"{100 * target:g}%"
            images = f"{self.images_per_second(row):.1f}"
            memory = f"{row.nbytes / (1 << 20):.0f}"
            table.add_row(row.name, images, *shares, wanted, verdict, memory)
        return table

    def _parts(self) -> Table:
        table = figure_columns(["ms of a step"], ["all", "lost", *PARTS])
        for row in self.rows:
            parts = [row.parts.get(part) for part in PARTS]
            figures = [self.step_seconds(row), self.lost(row), *parts]
            cells = ["-" if figure is None else f"{1e3 * figure:.2f}" for figure in figures]
            table.add_row(row.name, *cells)
        return table

    def absences(self) -> list[str]:
        """Return a line for each contender that is missing from the table."""
        return absences(self.missing)

    def to_json(self) -> str:
        """Return every figure of the table, the seconds behind it and the machine, as JSON."""
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
        """Plot bars of the speeds, with a line from the slowest turn to the fastest.

        A red mark shows the target.
        """
        from matplotlib.figure import Figure  # slow to import

        size = (8, 0.6 * len(self.rows) + 1.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        around = [
            (100 * (row.speed - min(row.speeds)), 100 * (max(row.speeds) - row.speed))
            for row in self.rows
        ]
        names, speeds = [row.name for row in self.rows], [100 * row.speed for row in self.rows]
        axes.barh(names, speeds, xerr=list(zip(*around, strict=True)), capsize=3)
        targets = [item for item in self.targets.items() if item[0] in names]
        places, wanted = [names.index(name) for name, _ in targets], [100 * t for _, t in targets]
        axes.vlines(wanted, [at - 0.4 for at in places], [at + 0.4 for at in places], colors="C3")
        axes.invert_yaxis()
        axes.set_xlabel(
            "percent of the independent copies' speed: median, slowest and quickest turn; target"
            " in red"
        )
        axes.set_title(f"{self.model}, {self.num_ranks} ranks with {self.batch} images each")
        save_plot(figure, file)


def task_of(model: str) -> Task:
    """Return the task of this name; raise ConfigError if there is none."""
    if model not in TASKS:
        raise ConfigError(f"--model {model!r}: no such model; choose one of {', '.join(TASKS)}")
    return TASKS[model]
