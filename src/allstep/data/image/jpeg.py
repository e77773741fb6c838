"""JPEG: decoding no more than a crop needs.

```
header -> which part? -> cut the file down to its rows -> decode them, reduced by 1, 2, 4 or 8, into the thread's own memory
```

**Cut.** Undoing the entropy code is most of a decoder's work (about two thirds at ImageNet's
sizes), so the rows that the crop does not need are taken out of the file first: see `jpeg_cut`.

**Reduced.** A crop that is at least twice as large as what it will become is decoded at 1/2, 1/4 or
1/8 of its size: the decoder then computes (nearly) the means of pixels, which is what a good
reduction does with them anyway.

**Faults.** A file that ends too early, or whose code is broken, is an error. libjpeg would go on
and fill up with grey, and OpenCV hands that out without a word; so every complaint counts here.
libjpeg passes on only the first complaint about an image. Where we cut rows off below, "extraneous
bytes before marker 0xd9" (the end) is what it has to say; when that comes first, the kept rows had
no fault. Complaints about a whole file that leave its image whole make it `Odd`: Pillow then
decides, which bears with them but does notice a missing end.

Accurate arithmetic throughout: libjpeg's quick one is 3% faster and off by more than one level on
average. Orientation in EXIF is ignored, as torchvision ignores it.
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
# rows around the crop that smoothly enlarged colour, and a stretch that begins between pixels, look
# at
_MARGIN = 2
_KEPT = (
    64 << 20
)  # bytes of scratch memory that a thread keeps; more than that is taken anew each time


class _Scratch(threading.local):
    """A thread's memory for decoded images: the first touch of fresh memory costs more than
    decoding into it."""

    memory = np.empty(0, np.uint8)

    def of(self, nbytes: int) -> Pixels:
        if nbytes > _KEPT:
            return np.empty(nbytes, np.uint8)
        if nbytes > self.memory.size:
            self.memory = np.empty(nbytes + nbytes // 4, np.uint8)
        return self.memory


_scratch = _Scratch()


def is_jpeg(data: memoryview) -> bool:
    """Whether these bytes begin as a JPEG does."""
    return bytes(data[:3]) == b"\xff\xd8\xff"


def decode_whole(data: memoryview, channels: int, max_pixels: int = MAX_PIXELS) -> Pixels:
    """All of the image. Odd when others should try, ValueError when it is broken or too large."""
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
    """An image that holds the part which `region_of(height, width)` names, and where in it: as
    stored, or reduced by 2, 4 or 8.

    The part is to become `size`. The image lies in memory that the thread's next call writes
    over. Odd when others should try, ValueError when it is broken or too large.
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
    top = region.top - rows.top
    return image, Box(
        top / factor, region.left / factor, region.height / factor, region.width / factor
    )


def _checked_header(data: memoryview, max_pixels: int) -> Header:
    header = read_header(data)
    check_size((header.height, header.width), max_pixels)
    if not header.one_scan:
        check_scans(data)
    return header


def _cut_decoded(rows: Cut, width: int, channels: int, factor: int) -> Pixels | None:
    """The rows; None when something is wrong with them, and the whole file must tell what."""
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
