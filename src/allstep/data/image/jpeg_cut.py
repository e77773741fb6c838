"""A JPEG cut down to the rows of a crop, without decoding it.

**Below the crop.** A decoder must begin at the top, but it stops at the height that the header
names. A copy of the bytes with another height there, a whole number of coded rows, costs only the
rows that count. The kept rows are the same bit for bit.

**Above it too**, where restart markers (RST0 ... RST7, round and round) follow whole rows: there
the code begins afresh. The copy then has the rows of the crop only, and its markers are numbered
anew.

```
height 48  SOS row0 RST0 row1 RST1 row2 RST2 row3 RST3 row4 RST4 row5 EOI
height 16  SOS                     row2 RST0 row3                     EOI       a crop within rows 2 and 3
```

Only files whose rows are coded once (no progressive ones) can be cut like this.
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
    """Whether rows that do not belong to it follow before its end."""


def cut(data: memoryview, header: Header, region: Region, margin: int = 2) -> Cut | None:
    """`data` cut down to what `region` and `margin` rows around it need; None when there is nothing
    to gain or it cannot be done."""
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
    """Coded rows `first` to `last`, or some more so that they begin and end at markers."""
    num_rows, units = -(-header.height // header.mcu[0]), -(-header.width // header.mcu[1])
    rows_each = max(1, header.restart // units)  # rows from marker to marker
    per_row = max(1, units // header.restart)  # markers to a row
    if header.restart * per_row != units * rows_each:
        return None  # they fall within rows
    first, last, num = (
        first // rows_each,
        -(-last // rows_each),
        -(-num_rows // rows_each),
    )  # now in steps of rows_each
    edges = _edges(data, header.rows_at)
    if last - first == num or len(edges) != num * per_row + 1:
        return None
    top = first * rows_each * header.mcu[0]
    height = min(header.height, last * rows_each * header.mcu[0]) - top
    code = _with_height(data[: header.rows_at], header, height)
    return Cut(
        top,
        height,
        code + _renumbered(data, edges[first * per_row : last * per_row + 1]),
        rest=False,
    )


def _edges(data: memoryview, begin: int) -> NDArray[np.int64]:
    """Where the stretches between restart markers begin; the last edge is what would follow EOI.

    (0xFF in code is 0xFF 0x00.)
    """
    code = np.frombuffer(data, np.uint8)[begin:]
    found = np.flatnonzero(code[:-1] == 0xFF)
    markers = found[(code[found + 1] & 0xF8) == 0xD0]
    return np.concatenate([[begin], begin + markers + 2, [len(data)]])


def _renumbered(data: memoryview, edges: NDArray[np.int64]) -> bytearray:
    """The stretches between these edges, with markers from RST0 on between them and EOI at the end."""
    code = bytearray(data[edges[0] : edges[-1]])
    places = edges[1:] - edges[0] - 1
    np.frombuffer(code, np.uint8)[places] = 0xD0 + np.arange(len(places)) % 8
    code[-1] = _EOI[1]
    return code
