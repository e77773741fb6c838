"""An image of many layers over time: one pixel a value, stretched by the browser.

Rows are layers in the order of the model, columns stretches of the run, colour the logarithm of the
value (viridis: dark is small). A few thousand rectangles of SVG would weigh more than all the rest
of the page; as a PNG they weigh some hundred bytes.
"""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allstep.runlog import LARGEST, Fields

_COLUMNS = 80
_ROWS = 160


@dataclass(frozen=True)
class Heat:
    """The image and what its corners mean."""

    source: str
    layers: tuple[str, ...]
    """Row by row, from the top."""
    low: float
    high: float
    columns: int


def trust_heat(lines: Sequence[Fields]) -> Heat | None:
    """Trust ratios of step lines with `trust: {layer: ratio}`; None when there are none above 0."""
    told = [
        line["trust"] for line in lines if isinstance(line.get("trust"), dict) and line["trust"]
    ]
    layers = tuple(dict.fromkeys(name for each in told for name in each))[:_ROWS]
    columns = (
        [told[len(told) * i // _COLUMNS] for i in range(_COLUMNS)] if len(told) > _COLUMNS else told
    )
    table = [[_log(column.get(layer)) for column in columns] for layer in layers]
    known = [value for row in table for value in row if value is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    return Heat(_png(table, low, high), layers, 10**low, 10**high, len(columns))


def _log(value: Any) -> float | None:
    return (
        math.log10(value)
        if isinstance(value, int | float) and 1 / LARGEST < value < LARGEST
        else None
    )


def _png(table: Sequence[Sequence[float | None]], low: float, high: float) -> str:
    import numpy as np  # only runs with trust ratios wait for these three
    from matplotlib import colormaps
    from PIL import Image

    span = (high - low) or 1.0
    parts = np.array(
        [[np.nan if value is None else (value - low) / span for value in row] for row in table]
    )
    colours = colormaps["viridis"](
        np.ma.masked_invalid(parts), bytes=True
    )  # what is not known is transparent
    image = Image.fromarray(colours)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
