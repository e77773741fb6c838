"""Read the header of a JPEG: the segments before its coded rows.

```
SOI | APPn.. | DQT | SOF0: precision, height, width, components | DHT | [DRI: interval] | SOS | rows
                                      ^ height_at                                       rows_at ^
```

A segment is a marker (0xFF and a kind) and a length of two bytes, which includes itself. Reading
them in Python from the first hundreds of bytes takes a microsecond or two.
"""

import re
from typing import NamedTuple

_SOF = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive"}
_SOS, _DRI = 0xDA, 0xDD
# Maximum: one bit for each block of 8 x 8 pixels (colors may have a quarter of the blocks).
_PIXELS_PER_BYTE = 512

# A progressive image has about 10 scans. A scan of 160 bytes may code nothing, but a decoder still
# visits all blocks.
_MAX_SCANS = 200
_SCAN = re.compile(b"\xff\xda")


class Odd(ValueError):
    """A JPEG that the fast decoder does not support, though it may be intact."""


class Header(NamedTuple):
    """The fields of the header that decoding a part needs."""

    height: int
    width: int
    mcu: tuple[int, int]
    """(height, width) in pixels of the unit in which all components are coded: mostly 8 or 16."""
    one_scan: bool
    """Whether each row is coded once, from top to bottom, and not in several passes."""
    restart: int
    """Number of units between restart markers; 0 if there are none."""
    height_at: int
    """Offset of the height in the file."""
    rows_at: int
    """Offset of the coded rows in the file."""


def read_header(data: memoryview) -> Header:
    """Return the header of a JPEG.

    Raises Odd if the header is unusual, ValueError if it contradicts the size of the file.
    """
    try:
        header = _read(data)
    except IndexError:
        raise Odd(f"no rows follow within its {len(data)} bytes") from None
    # Checked here, before memory is allocated for the image.
    if header.height * header.width > _PIXELS_PER_BYTE * len(data):
        raise ValueError(
            f"broken JPEG: {header.height} x {header.width} pixels cannot be in {len(data)} bytes"
        )
    return header


def check_scans(data: memoryview) -> None:
    """Raise ValueError for more scans than encoders make.

    A file of 2 MB with such scans takes minutes to decode.
    """
    num = sum(1 for _ in _SCAN.finditer(data))
    if num > _MAX_SCANS:
        raise ValueError(f"broken JPEG: {num} scans, expected at most {_MAX_SCANS}")


def _read(data: memoryview) -> Header:
    at, restart = 2, 0
    frame: tuple[int, int, bytes] | None = None
    while True:
        if data[at] != 0xFF:
            raise Odd(f"byte {at} should begin a segment")
        kind = data[at + 1]
        if kind == 0xFF:  # padding
            at += 1
            continue
        end = at + 2 + ((data[at + 2] << 8) | data[at + 3])
        if kind == _SOS:
            break
        if kind in _SOF:
            frame = kind, at + 5, bytes(data[at + 4 : end])
        elif kind == _DRI:
            restart = (data[at + 4] << 8) | data[at + 5]
        at = end
    if frame is None:
        raise Odd("no frame of a usual kind")
    return _header(*frame, num_scanned=data[at + 4], restart=restart, rows_at=end)


def _header(
    kind: int, height_at: int, frame: bytes, num_scanned: int, restart: int, rows_at: int
) -> Header:
    """Return the header for a frame segment.

    `frame` is precision, height, width, number of components, then (name, sampling, table) of each.
    """
    height, width, num = (frame[1] << 8) | frame[2], (frame[3] << 8) | frame[4], frame[5]
    sampling = frame[7::3]
    factors = [side for each in sampling for side in (each >> 4, each & 15)]
    usual = frame[0] == 8 and height and width and num and len(sampling) == num
    if not usual or not all(1 <= factor <= 4 for factor in factors):
        raise Odd(f"{height} x {width} pixels of {frame[0]} bits in {num} components")
    mcu = 8 * max(s & 15 for s in sampling), 8 * max(s >> 4 for s in sampling)
    # A single component is never interleaved: its unit is 8 x 8 for all sampling factors.
    if num == 1:
        mcu = 8, 8
    one_scan = _SOF[kind] != "progressive" and num_scanned == num
    return Header(height, width, mcu, one_scan, restart, height_at, rows_at)
