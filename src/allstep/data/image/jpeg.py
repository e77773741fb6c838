"""Decode JPEGs, and no more of them than a crop needs.

```
header -> region -> cut the file down to the region's rows -> decode them into the thread's memory
                                                              at 1, 1/2, 1/4 or 1/8 of their size
```

**Cut.** Entropy decoding is most of a decoder's work (about two thirds at ImageNet's sizes), so the
rows that the crop does not need are removed from the file first: see `jpeg_cut`.

**Reduced.** A crop that is at least twice as large as its final size is decoded at 1/2, 1/4 or 1/8
of its size: the decoder then computes (nearly) the means of pixels, as a good reduction does.

**Faults.** A file that ends too early, or has broken code, is an error. libjpeg would continue and
fill the rest with grey, and OpenCV returns that without an error; so every warning counts here.
libjpeg reports only its first warning about an image. After rows were cut off below, the expected
warning is "extraneous bytes before marker 0xd9" (the end); if this is the first one, the kept rows
have no fault. Warnings about a whole file that leave its image intact raise `Odd`: Pillow then
decides, which tolerates them but detects a missing end.

Decoding always uses accurate arithmetic: libjpeg's fast one saves 3% and is off by more than one
level on average. EXIF orientation is ignored, as in torchvision.
"""

import re
import threading
from collections.abc import Callable

import numpy as np
import simplejpeg

from allstep.data.image.jpeg_cut import Cut, cut
from allstep.data.image.jpeg_header import Header, Odd, check_scans, read_header
from allstep.data.image.limit import MAX_PIXELS, check_size
from allstep.data.image.pixels import Pixels, Region
from allstep.data.image.resize import Box, reduction

_BROKEN = re.compile(
    "premature end|bad huffman|corrupt|empty jpeg|instead of rst|arithmetic", re.IGNORECASE
)
_HARMLESS = re.compile("extraneous bytes before marker")
_CUT_OFF = re.compile("extraneous bytes before marker 0xd9")
_KINDS = {1: "GRAY", 3: "RGB"}
# Rows around the crop that color upsampling reads, and a resize that starts between pixels.
_MARGIN = 2
# Maximum bytes of scratch memory that a thread keeps; more than that is allocated for each call.
_KEPT = 64 << 20


class _Scratch(threading.local):
    """A thread's memory for decoded images.

    Touching fresh memory for the first time costs more than decoding into it.
    """

    memory = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> Pixels:
        """Return memory of at least `nbytes` bytes."""
        if nbytes > _KEPT:
            return np.empty(nbytes, np.uint8)
        if nbytes > self.memory.size:
            self.memory = np.empty(nbytes + nbytes // 4, np.uint8)
        return self.memory


_scratch = _Scratch()


def is_jpeg(data: memoryview) -> bool:
    """Return whether `data` starts with the bytes of a JPEG."""
    return bytes(data[:3]) == b"\xff\xd8\xff"


def decode_whole(data: memoryview, channels: int, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the whole image.

    Raises Odd if another decoder should try, ValueError if the image is broken or too large.
    """
    _checked_header(data, max_pixels)
    try:
        image: Pixels = simplejpeg.decode_jpeg(data, _KINDS[channels])
    except ValueError as error:
        raise _judged(error) from None
    return image


def decode_part(
    data: memoryview,
    region_of: Callable[[int, int], Region],
    size: tuple[int, int],
    channels: int,
    max_pixels: int = MAX_PIXELS,
) -> tuple[Pixels, Box]:
    """Return an image that contains the region `region_of(height, width)`, and its box in it.

    The image is as stored, or reduced by 2, 4 or 8, as far as the caller's resize to `size` allows.
    It is in memory that the thread's next call overwrites.

    Raises Odd if another decoder should try, ValueError if the image is broken or too large.
    """
    header = _checked_header(data, max_pixels)
    region = region_of(header.height, header.width)
    factor = min(8, reduction(region.height, region.width, size))
    rows = cut(data, header, region, _MARGIN * factor)
    image = None if rows is None else _cut_decoded(rows, header.width, channels, factor)
    if rows is None or image is None:
        rows = Cut(0, header.height, data, rest=False)
        image = _memory(rows, header.width, channels, factor)
        try:
            _decode_into(image, rows)
        except ValueError as error:
            raise _judged(error) from None
    box = (region.top - rows.top, region.left, region.height, region.width)
    return image, Box(*(edge / factor for edge in box))


def _checked_header(data: memoryview, max_pixels: int) -> Header:
    header = read_header(data)
    check_size((header.height, header.width), max_pixels)
    if not header.one_scan:
        check_scans(data)
    return header


def _cut_decoded(rows: Cut, width: int, channels: int, factor: int) -> Pixels | None:
    """Return the decoded rows, or None if they have a fault that the whole file must show."""
    memory = _memory(rows, width, channels, factor)
    try:
        _decode_into(memory, rows)
    except ValueError as error:
        if not (rows.rest and _CUT_OFF.search(str(error))):
            return None
    return memory


def _decode_into(memory: Pixels, rows: Cut) -> None:
    height, width, channels = memory.shape
    simplejpeg.decode_jpeg(
        rows.code, _KINDS[channels], min_height=height, min_width=width, buffer=memory
    )


def _memory(rows: Cut, width: int, channels: int, factor: int) -> Pixels:
    shape = -(-rows.height // factor), -(-width // factor), channels
    nbytes = shape[0] * shape[1] * channels
    return _scratch.of(nbytes)[:nbytes].reshape(shape)


def _judged(error: ValueError) -> ValueError:
    text = str(error)
    if _BROKEN.search(text) and not _HARMLESS.search(text):
        return ValueError(f"broken JPEG: {text}")
    return Odd(text)
