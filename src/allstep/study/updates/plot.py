"""Plot of the updates to a goal by batch, next to the published shape."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allstep.study.axes import save_figure, set_batch_axis, set_log_y

if TYPE_CHECKING:
    from allstep.study.updates.published import Published
    from allstep.study.updates.table import UpdatesTable


def draw(table: "UpdatesTable", file: Path) -> None:
    """Write the plot to `file`: left our updates; right, if there are any, the published ones too.

    The right panel is relative to one batch because only the shapes can be compared.
    """
    # imported here because the import is slow
    from matplotlib.figure import Figure

    panels = 2 if table.published else 1
    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_counted(axes[0], table)
    if table.published:
        _draw_comparison(axes[1], table, table.published)
    save_figure(figure, file)


def _draw_counted(axes: Any, table: "UpdatesTable") -> None:
    """Draw a small point for every learning rate, large ones for the best, and the fit."""
    ours = table.points()
    tried = [
        (row.batch, run.reached.updates)
        for row in table.rows
        for _, run in row.tried
        if run.reached
    ]
    axes.plot(
        [x for x, _ in tried], [y for _, y in tried], ".", color="0.6", label="other learning rates"
    )
    axes.plot(list(ours), list(ours.values()), "o", color="C0", label="best learning rate")
    if (found := table.fit()) is not None:
        low, high = min(ours), max(ours)
        xs = [low * (high / low) ** (i / 60) for i in range(61)]
        label = f"{found.fewest_updates:.0f} + {found.fewest_samples:.0f} / B"
        axes.plot(xs, [found(x) for x in xs], "--", color="C0", linewidth=1, label=label)
    axes.set_ylabel(f"updates to {table.search.goal:.0%} validation accuracy")
    _finish(axes, table.search.batches)


def _draw_comparison(axes: Any, table: "UpdatesTable", published: "Published") -> None:
    """Draw our and the published updates, both relative to those of a batch that both have."""
    ours = table.points()
    common = [batch for batch in sorted(ours) if batch in published.points]
    if common:
        at = 128 if 128 in common else common[0]
        _draw_relative(
            axes, ours, at, "o-", f"{table.search.recipe}, {1 - table.search.goal:.0%} error"
        )
        _draw_relative(axes, published.points, at, "s--", published.source)
        axes.set_ylabel(f"updates, relative to those of batch {at}")
    powers_of_two = (batch for batch in published.points if batch.bit_count() == 1)
    _finish(axes, sorted({*table.search.batches, *powers_of_two}))


def _draw_relative(axes: Any, points: Mapping[int, int], at: int, style: str, label: str) -> None:
    axes.plot(list(points), [value / points[at] for value in points.values()], style, label=label)


def _finish(axes: Any, batches: Sequence[int]) -> None:
    set_log_y(axes)
    set_batch_axis(axes, batches)
    if axes.lines:
        axes.legend(fontsize="small")
