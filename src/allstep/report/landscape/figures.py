"""Figures of landscapes: a file with all plots of a command, and the images of a page.

```
draw_file    one row per run: contour and surface; a row for the line    FILE.png, white
views        one image per plot, without background                      data: URLs in the page
```

The page has a light and a dark form, so its images are transparent and their text is gray.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.report.landscape import draw
from allstep.report.landscape.draw import Scale
from allstep.report.run import Run
from allstep.study.axes import save_figure
from allstep.study.landscape.result import Around, Line
from allstep.study.landscape.summary import Rows, around_rows, line_rows

_GRAY = "#808080"
_DPI = 110


@dataclass(frozen=True)
class Image:
    """A plot as an image of a page."""

    source: str
    """The PNG as a data: URL."""
    about: str
    """Description of the plot."""


@dataclass(frozen=True)
class LandscapeView:
    """The landscape of a run as a page shows it."""

    images: tuple[Image, ...]
    rows: Rows
    """Names and values of the figures."""


def draw_file(found: Sequence[Around], line: Line | None, file: Path) -> None:
    """Draw the landscapes of runs, on one scale, and the line between two of them."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    scale, is_flat = _scale(found), len(found[0].grid) == 1
    num_rows = (1 if is_flat else len(found)) + (line is not None)
    figure = Figure(
        figsize=(10, 4.4 * num_rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1)
    )
    for row, each in enumerate([] if is_flat else found):
        _draw_row(figure, (num_rows, 2, 2 * row + 1), each, scale)
    if is_flat:
        axes = figure.add_subplot(num_rows, 1, 1)
        draw.curves(axes, found)
        axes.set_title(" and ".join(each.run for each in found))
    if line is not None:
        draw.between(figure.add_subplot(num_rows, 2, 2 * num_rows - 1), line)
        draw.rises(figure.add_subplot(num_rows, 2, 2 * num_rows), line)
    save_figure(figure, file)


def _draw_row(figure: Any, place: tuple[int, int, int], found: Around, scale: Scale) -> None:
    """Draw contour and surface of a run next to each other."""
    rows, columns, first = place
    axes = figure.add_subplot(rows, columns, first)
    draw.color_bar(figure, draw.contour(axes, found, scale), axes, scale)
    axes.set_title(found.run)
    draw.surface(figure.add_subplot(rows, columns, first + 1, projection="3d"), found, scale)


def views(runs: Sequence[Run]) -> list[LandscapeView | None]:
    """Return the view of each run; None for a run without a landscape."""
    found = [run.landscape for run in runs if run.landscape is not None]
    if not found:
        return [None] * len(runs)
    scale = _scale(found)
    return [_view(run.landscape, run.line, scale) for run in runs]


def _scale(found: Sequence[Around]) -> Scale:
    return Scale.of([loss for each in found for loss in (*each.losses, each.center.loss)])


def _view(found: Around | None, line: Line | None, scale: Scale) -> LandscapeView | None:
    if found is None:
        return None
    rows, images = around_rows(found), list(_around_images(found, scale))
    if line is not None:
        rows += line_rows(line)
        images += _line_images(line)
    return LandscapeView(tuple(images), rows)


def _around_images(found: Around, scale: Scale) -> list[Image]:
    if len(found.grid) == 1:
        figure, axes = _empty()
        draw.curves(axes, [found])
        return [Image(_url(figure), "Loss along a random direction around the trained weights")]
    flat, axes = _empty()
    draw.color_bar(flat, draw.contour(axes, found, scale), axes, scale)
    solid, solid_axes = _empty(projection="3d")
    draw.surface(solid_axes, found, scale)
    return [
        Image(
            _url(flat, palette=False),
            "Contours of the loss over two random directions around the weights",
        ),
        Image(_url(solid), "The same loss as a surface"),
    ]


def _line_images(line: Line) -> list[Image]:
    path, axes = _empty()
    draw.between(axes, line)
    bars, bar_axes = _empty()
    draw.rises(bar_axes, line)
    return [
        Image(_url(path), "Loss and accuracy on the line between the two runs"),
        Image(_url(bars), "Rise of the loss of both runs in ten directions"),
    ]


def _empty(**how: Any) -> tuple[Any, Any]:
    """Return a new figure and its axes."""
    # Imported here because the import is slow and most runs have no landscape.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.12)
    figure = Figure(figsize=(5, 4), layout=layout, facecolor="none")
    axes = figure.add_subplot(facecolor="none", **how)
    return figure, axes


def _url(figure: Any, *, palette: bool = True) -> str:
    """Return the figure as a data: URL, its text and lines in gray.

    Without a palette it keeps all colors, which a colored plane needs: few show as bands.
    """
    for part in figure.findobj(match=_is_frame):
        part.set_color(_GRAY)
    for axes in figure.axes:
        axes.tick_params(colors=_GRAY)
        for spine in axes.spines.values():
            spine.set_edgecolor(_GRAY)
        if (legend := axes.get_legend()) is not None:
            legend.get_frame().set_facecolor("none")
    return "data:image/png;base64," + base64.b64encode(_png(figure, palette=palette)).decode()


def _png(figure: Any, *, palette: bool) -> bytes:
    """Return the figure as a PNG; with a palette it has a quarter of the bytes."""
    from PIL import Image as PillowImage

    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=_DPI, transparent=True)
    if not palette:
        return full.getvalue()
    # This method is the one that keeps the transparency.
    with PillowImage.open(full) as image:
        image.quantize(200, PillowImage.Quantize.FASTOCTREE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _is_frame(part: Any) -> bool:
    """Return whether a part of a figure is text outside of the plotted area."""
    from matplotlib.text import Text

    # Labels of contour lines are on the colors, and stay white.
    return isinstance(part, Text) and part.get_color() == "black"
