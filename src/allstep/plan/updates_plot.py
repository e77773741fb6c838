"""The picture of updates to a goal against the batch, beside the published shape."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allstep.plan.batch_plots import set_batch_axis, set_log_y
from allstep.plan.published import FASHION_MNIST, SOURCE

if TYPE_CHECKING:
    from allstep.plan.updates_table import UpdatesTable


def draw(table: "UpdatesTable", file: Path) -> None:
    """Left what was counted, right both curves through 1 at a batch that both have: only their shapes can be compared."""
    from matplotlib.figure import Figure  # takes a while to import

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    ours = table.points()
    _draw_counted(left, table)
    common = [batch for batch in sorted(ours) if batch in FASHION_MNIST]
    if common:
        at = 128 if 128 in common else common[0]
        _draw_relative(right, ours, at, "o-", f"{table.search.recipe}, {1 - table.search.goal:.0%} error")
        _draw_relative(right, FASHION_MNIST, at, "s--", SOURCE)
        right.set_ylabel(f"updates, relative to those of batch {at}")
    everywhere = sorted({*table.search.batches, *(batch for batch in FASHION_MNIST if batch.bit_count() == 1)})
    for axes, batches in ((left, table.search.batches), (right, everywhere)):
        set_log_y(axes)
        set_batch_axis(axes, batches)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(file)


def _draw_counted(axes: Any, table: "UpdatesTable") -> None:
    """Every rate as a small point, the best ones large, and the fit."""
    ours = table.points()
    tried = [(row.batch, run.reached.updates) for row in table.rows for _, run in row.tried if run.reached]
    axes.plot([x for x, _ in tried], [y for _, y in tried], ".", color="0.6", label="other rates")
    axes.plot(list(ours), list(ours.values()), "o", color="C0", label="best rate")
    if (found := table.fit()) is not None:
        low, high = min(ours), max(ours)
        xs = [low * (high / low) ** (i / 60) for i in range(61)]
        label = f"{found.fewest_updates:.0f} + {found.fewest_samples:.0f} / B"
        axes.plot(xs, [found(x) for x in xs], "--", color="C0", linewidth=1, label=label)
    axes.set_ylabel(f"updates to {table.search.goal:.0%} validation accuracy")


def _draw_relative(axes: Any, points: Mapping[int, int], at: int, style: str, label: str) -> None:
    axes.plot(list(points), [value / points[at] for value in points.values()], style, label=label)
