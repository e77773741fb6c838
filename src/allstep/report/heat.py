"""Heat map of layers over time, as an image with one pixel per value that the browser scales.

Rows are layers in the order of the model, columns are intervals of the run, the color is the
logarithm of the value (viridis: dark is small). A few thousand SVG rectangles would be larger than
the rest of the page; a PNG has a few hundred bytes.
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
    """A heat map with its labels and range of values."""

    source: str
    """The PNG as a data: URL."""
    layers: tuple[str, ...]
    """Names of the rows, from the top."""
    low: float
    high: float
    columns: int


def trust_heat(lines: Sequence[Fields]) -> Heat | None:
    """Return the heat map of the trust ratios in step lines; None if there are none above 0.

    These lines have `trust: {layer: ratio}`.
    """
    ratios = [
        line["trust"] for line in lines if isinstance(line.get("trust"), dict) and line["trust"]
    ]
    layers = tuple(dict.fromkeys(name for each in ratios for name in each))[:_ROWS]
    num_columns = min(len(ratios), _COLUMNS)
    columns = [ratios[len(ratios) * i // num_columns] for i in range(num_columns)]
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
    # imported here because the imports are slow and most runs have no trust ratios
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image

    span = (high - low) or 1.0
    parts = np.array(
        [[np.nan if value is None else (value - low) / span for value in row] for row in table]
    )
    # unknown values are transparent
    colors = colormaps["viridis"](np.ma.masked_invalid(parts), bytes=True)
    file = io.BytesIO()
    Image.fromarray(colors).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
