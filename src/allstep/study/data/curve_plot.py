"""Plot of a learning curve: points, laws and their band, in log-log up to ten times the data."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.study.axes import save_figure, set_log_y
from allstep.study.data.verdict import SAFE

if TYPE_CHECKING:
    from allstep.study.data.learning_curve import Curve
    from allstep.study.data.table import DataTable

_STEPS = 60


def draw(table: "DataTable", file: Path) -> None:
    """Write the plot to `file`."""
    # imported here because the import is slow
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axes = figure.subplots()
    if table.curve is not None:
        _draw_curve(axes, table.curve, table.grid.sizes[0], SAFE * table.grid.whole)
    _draw_points(axes, table)
    if table.grid.goal is not None:
        axes.axhline(
            100 * (1 - table.grid.goal), color="C2", linewidth=1, linestyle=":", label="goal"
        )
    axes.set_title(f"{table.grid.recipe}, {table.grid.updates:,} updates", fontsize="medium")
    _finish(axes, table)
    save_figure(figure, file)


def _draw_points(axes: Any, table: "DataTable") -> None:
    """Draw a small point for each run, and the mean of a size with its std."""
    runs = [(size.samples, 100 * each) for size in table.sizes for each in size.validation]
    if not runs:
        return
    axes.plot(*zip(*runs, strict=True), ".", color="0.6", label="runs")
    points = table.points
    axes.errorbar(
        points.samples,
        [100 * each for each in points.errors],
        [100 * each for each in points.spreads],
        fmt="o",
        color="C0",
        markersize=5,
        capsize=2,
        label="mean ± std",
    )


def _draw_curve(axes: Any, curve: "Curve", first: float, last: float) -> None:
    """Draw the laws and the band, from the smallest size to ten times the data."""
    ns = np.geomspace(first, last, _STEPS)
    found = [curve.predict(float(n)) for n in ns]
    low, high = (
        [100 * each for each in ends] for ends in zip(*[f[1:3] for f in found], strict=True)
    )
    axes.fill_between(ns, low, high, color="C0", alpha=0.15, linewidth=0, label="90% band")
    names = ("with floor", "without floor")
    for law, name, style in zip(curve.laws, names, ("-", "--"), strict=False):
        values = [100 * float(law(float(n))[0]) for n in ns]
        axes.plot(ns, values, style, color="C0", linewidth=1, label=name)


def _finish(axes: Any, table: "DataTable") -> None:
    set_log_y(axes)
    if table.points.samples:
        axes.set_xscale("log")
        axes.axvline(table.grid.whole, color="0.5", linewidth=1, label="all the data")
        axes.legend(fontsize="small")
    axes.set_xlabel("training samples")
    axes.set_ylabel("validation error, %")
    axes.grid(alpha=0.3, which="both")
