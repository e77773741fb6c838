"""Plots of a batch study: accuracy, updates to the goal and time to the goal by batch."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from allstep.study.axes import save_figure, set_batch_axis, set_log_y

if TYPE_CHECKING:
    from allstep.study.batch.table import BatchTable, Cell


def draw(table: "BatchTable", file: Path) -> None:
    """Write the plots next to each other to `file`; those of the goal only if the study has one."""
    # imported here because the import is slow
    from matplotlib.figure import Figure

    panels = 1 if table.grid.goal is None else 3
    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_lines(axes[0], table, lambda cell: [100 * value for value in cell.test])
    axes[0].set_ylabel(f"test accuracy after {table.grid.epochs} epochs, %")
    if table.grid.goal is not None:
        _draw_lines(axes[1], table, lambda cell: cell.updates, line="none")
        _draw_fits(axes[1], table)
        axes[1].set_title("dashed: S = Smin + Emin / B", fontsize="small")
        axes[1].set_ylabel(f"updates to {table.grid.goal:.0%} validation accuracy")
        _draw_lines(axes[2], table, lambda cell: cell.seconds)
        axes[2].set_ylabel(f"seconds of training to {table.grid.goal:.0%}, one core")
        for each in axes[1:]:
            set_log_y(each)
    for each in axes:
        set_batch_axis(each, table.grid.batches)
        each.legend(fontsize="small")
    figure.suptitle(table.grid.recipe)
    save_figure(figure, file)


def _draw_lines(
    axes: Any, table: "BatchTable", values: "Callable[[Cell], list[float]]", line: str = "-"
) -> None:
    """Draw a line of means for each remedy, and a point for each run."""
    for number, name in enumerate(table.grid.remedies):
        cells = [cell for cell in _cells(table, name) if values(cell)]
        colour = f"C{number}"
        batches = [cell.batch for cell in cells]
        axes.plot(
            batches,
            [fmean(values(cell)) for cell in cells],
            linestyle=line,
            color=colour,
            marker="o",
            label=name,
        )
        single = [(cell.batch, value) for cell in cells for value in values(cell)]
        axes.plot([x for x, _ in single], [y for _, y in single], ".", color=colour, alpha=0.4)


def _draw_fits(axes: Any, table: "BatchTable") -> None:
    low, high = table.grid.batches[0], table.grid.batches[-1]
    xs = [low * (high / low) ** (i / 60) for i in range(61)]
    for number, name in enumerate(table.grid.remedies):
        if (found := table.fit(name)) is not None:
            axes.plot(xs, [found(x) for x in xs], "--", color=f"C{number}", linewidth=1)


def _cells(table: "BatchTable", remedy: str) -> "Iterable[Cell]":
    return [
        table.cells[batch, remedy] for batch in table.grid.batches if (batch, remedy) in table.cells
    ]
