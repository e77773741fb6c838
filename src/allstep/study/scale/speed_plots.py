"""Plots of a scaling study: speed by number of workers, and the step by part."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from allstep.study.axes import save_figure
from allstep.study.scale.parts import PARTS

if TYPE_CHECKING:
    from allstep.study.scale.table import ScaleTable


def draw(table: "ScaleTable", file: Path) -> None:
    """Write both plots to `file`."""
    # imported here because the import is slow
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    speed, parts = figure.subplots(1, 2)
    if table.rows:
        _draw_speed(speed, table)
        _draw_parts(parts, table)
    kind = "weak scaling" if table.grid.per_worker else "strong scaling"
    batch = (
        f"{table.grid.batch} samples per worker"
        if table.grid.per_worker
        else (f"batch {table.grid.batch}")
    )
    figure.suptitle(f"{table.grid.recipe}: {kind}, {batch}")
    save_figure(figure, file)


def _draw_speed(axes: Any, table: "ScaleTable") -> None:
    """Draw the median speed, the rounds, the ideal and the prediction of each row."""
    workers = [row.workers for row in table.rows]
    medians = [median(row.speeds) for row in table.rows]
    per_worker = medians[0] / workers[0]
    axes.plot(workers, [per_worker * each for each in workers], "--", color="0.6", label="ideal")
    axes.plot(workers, medians, "o-", label="measured: median of the rounds")
    for row in table.rows:
        axes.plot([row.workers] * len(row.speeds), row.speeds, ".", color="C0", alpha=0.4)
    guesses = table.forecasts
    if guesses:
        speeds = [each.samples_per_second for each in guesses.values()]
        axes.plot(list(guesses), speeds, "x", color="C3", label="predicted from fewer workers")
    axes.set_xlabel("workers")
    axes.set_ylabel("samples/s")
    axes.set_xticks(workers)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_parts(axes: Any, table: "ScaleTable") -> None:
    """Draw the parts of a step as a stack, with a mark at the ideal step."""
    names = [str(row.workers) for row in table.rows]
    bottoms = [0.0] * len(names)
    for number, part in enumerate(PARTS):
        values = [max(0.0, 1e3 * row.mean.parts[part]) for row in table.rows]
        axes.bar(names, values, 0.6, bottom=bottoms, color=f"C{number}", label=part)
        bottoms = [low + value for low, value in zip(bottoms, values, strict=True)]
    ideal = [1e3 * table.loss(row).ideal for row in table.rows]
    for place, height in enumerate(ideal):
        label = "ideal step" if place == 0 else None
        axes.hlines(height, place - 0.4, place + 0.4, colors="black", linestyles="--", label=label)
    axes.set_xlabel("workers")
    axes.set_ylabel("ms of a step")
    axes.legend(fontsize="small")
