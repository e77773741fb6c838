"""Cut a JPEG down to the rows of a crop, without decoding it.

**Below the crop.** A decoder must start at the top, but it stops at the height in the header. In a
copy of the file with a smaller height there, a whole number of coded rows, only the needed rows are
decoded. The kept rows are the same bit for bit.

**Above the crop**, too, if restart markers (RST0 ... RST7, repeated) follow whole rows: decoding
can start there. The copy then has the rows of the crop only, and its markers are renumbered.

```
height 48  SOS row0 RST0 row1 RST1 row2 RST2 row3 RST3 row4 RST4 row5 EOI
height 16  SOS                     row2 RST0 row3                     EOI    a crop of rows 2 and 3
```

Only files whose rows are coded once (not progressive ones) can be cut like this.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allstep.data.image.jpeg_header import Header
from allstep.data.image.pixels import Region

_EOI = b"\xff\xd9"


class Cut(NamedTuple):
    """Rows `top` to `top + height` of an image, as a JPEG of their own."""

    top: int
    height: int
    code: Any
    rest: bool
    """Whether the code has further rows, below `height`, before its end."""


def cut(data: memoryview, header: Header, region: Region, margin: int = 2) -> Cut | None:
    """Return `data` cut down to the rows of `region` and `margin` rows around it.

    Return None if there is nothing to gain or the file cannot be cut.
    """
    if not header.one_scan or bytes(data[-2:]) != _EOI:
        return None
    step = header.mcu[0]
    first = max(0, region.top - margin) // step
    last = -(-min(header.height, region.top + region.height + margin) // step)
    if header.restart:
        return _between_restarts(data, header, first, last)
    if last * step >= header.height:
        return None
    return Cut(0, last * step, _with_height(data, header, last * step), rest=True)


def _with_height(data: Any, header: Header, height: int) -> bytearray:
    copy = bytearray(data)
    copy[header.height_at : header.height_at + 2] = height.to_bytes(2, "big")
    return copy


def _between_restarts(data: memoryview, header: Header, first: int, last: int) -> Cut | None:
    """Return coded rows `first` to `last`, extended so that they start and end at markers."""
    num_rows, units = -(-header.height // header.mcu[0]), -(-header.width // header.mcu[1])
    rows_each = max(1, header.restart // units)
    per_row = max(1, units // header.restart)
    # Markers that are not at the ends of rows are of no use.
    if header.restart * per_row != units * rows_each:
        return None
    # From here on, these count groups of `rows_each` rows.
    first, last, num = first // rows_each, -(-last // rows_each), -(-num_rows // rows_each)
    edges = _edges(data, header.rows_at)
    if last - first == num or len(edges) != num * per_row + 1:
        return None
    top = first * rows_each * header.mcu[0]
    height = min(header.height, last * rows_each * header.mcu[0]) - top
    code = _with_height(data[: header.rows_at], header, height)
    code += _renumbered(data, edges[first * per_row : last * per_row + 1])
    return Cut(top, height, code, rest=False)


def _edges(data: memoryview, begin: int) -> NDArray[np.int64]:
    """Return the offsets behind all restart markers, from `begin` on, and the end of the data.

    A byte 0xFF within the code is stored as 0xFF 0x00, so it cannot be mistaken for a marker.
    """
    code = np.frombuffer(data, np.uint8)[begin:]
    found = np.flatnonzero(code[:-1] == 0xFF)
    markers = found[(code[found + 1] & 0xF8) == 0xD0]
    return np.concatenate([[begin], begin + markers + 2, [len(data)]])


def _renumbered(data: memoryview, edges: NDArray[np.int64]) -> bytearray:
    """Return the code between these edges, with markers from RST0 on and EOI at the end."""
    code = bytearray(data[edges[0] : edges[-1]])
    places = edges[1:] - edges[0] - 1
    np.frombuffer(code, np.uint8)[places] = 0xD0 + np.arange(len(places)) % 8
    code[-1] = _EOI[1]
    return code
