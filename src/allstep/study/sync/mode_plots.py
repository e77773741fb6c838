"""Plots of a sync study: accuracy against throughput, and the seconds to the goal, by fault."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from allstep.study.axes import save_figure
from allstep.study.sync.modes import NO_FAULT

if TYPE_CHECKING:
    from allstep.study.sync.table import SyncTable


def draw(table: "SyncTable", file: Path) -> None:
    """Write the plots to `file`: a column for each fault; the second row only with a goal."""
    # imported here because the import is slow
    from matplotlib.figure import Figure

    faults, goal = table.grid.faults, table.grid.goal
    rows = 1 if goal is None else 2
    figure = Figure(figsize=(5.5 * len(faults), 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, len(faults), squeeze=False)
    for column, fault in enumerate(faults):
        _draw_points(axes[0][column], table, fault)
        axes[0][column].set_title("no fault" if fault == NO_FAULT else fault, fontsize="medium")
        if goal is not None:
            _draw_seconds(axes[1][column], table, fault)
    axes[0][0].set_ylabel(f"test accuracy after {table.grid.epochs} epochs, %")
    figure.suptitle(f"{table.grid.recipe}, {table.grid.parties} parties")
    save_figure(figure, file)


def _draw_points(axes: Any, table: "SyncTable", fault: str) -> None:
    """Draw a point for each run, and a large one for the mean of a mode."""
    for number, mode in enumerate(table.grid.modes):
        runs = [
            (each.images_per_second, 100 * each.run.test)
            for each in table.cells[fault, mode].runs
            if each.images_per_second is not None and each.run.test is not None
        ]
        if runs:
            speeds, scores = zip(*runs, strict=True)
            color = f"C{number % 10}"
            axes.plot(speeds, scores, ".", color=color, alpha=0.4)
            axes.plot([fmean(speeds)], [fmean(scores)], "o", color=color, label=mode)
    axes.set_xlabel("images/s, all workers")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.set_xlim(left=0)
        axes.legend(fontsize="small")


def _draw_seconds(axes: Any, table: "SyncTable", fault: str) -> None:
    """Draw a bar for each mode, and a point for each run."""
    for number, mode in enumerate(table.grid.modes):
        seconds = table.cells[fault, mode].seconds
        if seconds:
            axes.barh([number], [fmean(seconds)], color=f"C{number % 10}", alpha=0.6)
            axes.plot(seconds, [number] * len(seconds), ".", color="0.3")
    axes.set_yticks(range(len(table.grid.modes)), list(table.grid.modes))
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of training to {table.grid.goal:.0%} validation accuracy")
    axes.grid(alpha=0.3, axis="x")
