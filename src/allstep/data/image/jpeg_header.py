"""What stands before the coded rows of a JPEG.

```
SOI | APPn ... | DQT | SOF0: precision, height, width, components | DHT | [DRI: interval] | SOS | rows of blocks ..... | EOI
                             ^^^^^^ height_at                                                     ^
                             rows_at
```

Segments are a marker (0xFF and a kind) and a length of two bytes that counts itself. Read in Python
from the first hundreds of bytes: a microsecond or two.
"""

import re
from typing import NamedTuple

_SOF = {0xC0: "baseline", 0xC1: "extended", 0xC2: "progressive"}
_SOS, _DRI = 0xDA, 0xDD
_PIXELS_PER_BYTE = (
    512  # more cannot be coded: one bit for each block of 8 x 8, of which colour may have a quarter
)

# A progressive image has about 10 scans. Each walks over all blocks, even if it codes nothing in
# 160 bytes.
_MAX_SCANS = 200
_SCAN = re.compile(b"\xff\xda")


class Odd(ValueError):
    """Not broken, as far as we can say, but not for the fast decoder either."""


class Header(NamedTuple):
    """What the segments say."""

    height: int
    width: int
    mcu: tuple[int, int]
    """(height, width) in pixels of the unit in which all components are coded: 8 or 16 each,
    mostly."""
    one_scan: bool
    """Whether each row is coded once, from the top down, and not in several passes."""
    restart: int
    """Units between restart markers; 0: there are none."""
    height_at: int
    rows_at: int


def read_header(data: memoryview) -> Header:
    """The header of a JPEG. Odd when it is not as usual, ValueError when it cannot be true."""
    try:
        header = _read(data)
    except IndexError:
        raise Odd(f"no rows follow within its {len(data)} bytes") from None
    if header.height * header.width > _PIXELS_PER_BYTE * len(
        data
    ):  # said before anybody takes memory for it
        raise ValueError(
            f"broken JPEG: {header.height} x {header.width} pixels cannot be in {len(data)} bytes"
        )
    return header


def check_scans(data: memoryview) -> None:
    """Raise ValueError for more scans than any encoder makes: 2 MB of them take minutes to decode."""
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
    """`frame`: precision, height, width, number of components, then (name, sampling, table) of
    each."""
    height, width, num = (frame[1] << 8) | frame[2], (frame[3] << 8) | frame[4], frame[5]
    sampling = frame[7::3]
    factors = [side for each in sampling for side in (each >> 4, each & 15)]
    usual = frame[0] == 8 and height and width and num and len(sampling) == num
    if not usual or not all(1 <= factor <= 4 for factor in factors):
        raise Odd(f"{height} x {width} pixels of {frame[0]} bits in {num} components")
    # A component alone is never interleaved: its unit is 8 x 8 whatever its factors say.
    mcu = (
        (8, 8)
        if num == 1
        else (8 * max(s & 15 for s in sampling), 8 * max(s >> 4 for s in sampling))
    )
    one_scan = _SOF[kind] != "progressive" and num_scanned == num
    return Header(height, width, mcu, one_scan, restart, height_at, rows_at)
