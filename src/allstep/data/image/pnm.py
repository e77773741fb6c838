"""Binary PGM and PPM files whose brightest level is not 255 or 65,535.

```
P5 4 3 4095\n   rows of 4 levels, top row first      P5: grey, P6: RGB
   | | |        each level is 1 byte where the brightest one is below 256, else 2, high byte first
   | | brightest level, 1 to 65,535
   width, height; `#` begins a comment up to the end of the line
```

OpenCV does not scale the levels of such files, so that a file of 4 or 12 bits becomes almost black.
Here the levels are scaled to 0 ... 255, as Pillow does for the text forms P2 and P3.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.image.limit import check_size
from allstep.data.image.pixels import Pixels

_FIELD = rb"(?:\s|#[^\n]*\n)+(\d{1,9})"
_HEADER = re.compile(rb"P([56])" + 3 * _FIELD + rb"\s")
_LONGEST_HEADER = 1 << 12
_AS_DECODED = (255, 65_535)
"""Maximum levels that OpenCV decodes correctly."""


def decode_scaled(code: memoryview, max_pixels: int) -> Pixels | None:
    """Return the image of a binary PGM or PPM file with scaled levels; None for all other files.

    It has the channels of the file: 1 for PGM, 3 for PPM.

    Raises:
        ValueError: the file is cut off, its brightest level is out of range, or it is too large.
    """
    header = _HEADER.match(bytes(code[:_LONGEST_HEADER]))
    if header is None or (brightest := int(header[4])) in _AS_DECODED:
        return None
    width, height = int(header[2]), int(header[3])
    check_size((height, width), max_pixels)
    if not 1 <= brightest < 65_536:
        raise ValueError(f"broken image: its brightest level is {brightest}, expected 1 to 65535")
    dtype = np.dtype("u1" if brightest < 256 else ">u2")
    depth = 1 if header[1] == b"5" else 3
    count = height * width * depth
    if len(code) - header.end() < count * dtype.itemsize:
        raise ValueError(
            f"broken image: {len(code) - header.end()} bytes of levels, expected"
            f" {count * dtype.itemsize}"
        )
    levels = np.frombuffer(code, dtype, count, header.end()).reshape(height, width, depth)
    return _scaled(levels, brightest)


def _scaled(levels: NDArray[Any], brightest: int) -> Pixels:
    """Return 8-bit levels, rounded; a level above the brightest counts as the brightest."""
    table = (np.arange(brightest + 1, dtype=np.int64) * 255 * 2 + brightest) // (2 * brightest)
    scaled: Pixels = table.astype(np.uint8)[np.minimum(levels, brightest)]
    return scaled
