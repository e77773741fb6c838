"""Shared by the plots of studies: batch axis, logarithmic axis, and writing a figure."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from allstep.study.folder import write_whole


def save_figure(figure: Any, file: Path) -> None:
    """Write `figure`, a matplotlib figure, to `file` as PNG."""
    content = BytesIO()
    figure.savefig(content, format="png")
    write_whole(file, content.getvalue())


def set_log_y(axes: Any) -> None:
    """Make the y axis logarithmic, with tick labels such as 0.3 instead of matplotlib's 3e-01."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return f"{value:g}" if super().__call__(value, position) else ""

    if _has_points(axes):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(Plain())
        axes.yaxis.set_minor_formatter(Plain(minor_thresholds=(2, 0.4)))


def set_batch_axis(axes: Any, batches: Sequence[int]) -> None:
    """Make the x axis logarithmic to base 2, with `batches` as ticks."""
    if _has_points(axes):
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(batches), [str(batch) for batch in batches])
    axes.set_xlabel("batch")
    axes.grid(alpha=0.3)


def _has_points(axes: Any) -> bool:
    """Return whether the axes have points; matplotlib cannot make empty axes logarithmic."""
    return any(len(line.get_xdata()) for line in axes.lines)
