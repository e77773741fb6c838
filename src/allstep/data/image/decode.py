"""From what a source stores to an image: uint8 (height, width, channels), 3 channels RGB or 1
grey.

| first bytes | by | when that fails |
|---|---|---|
| JPEG | simplejpeg (`jpeg`), only what a crop needs | Pillow: CMYK, odd sampling, harmless complaints. Broken files are errors at once |
| TIFF | Pillow: OpenCV hands out strips that it could not unpack, and multiplies by the transparency | |
| binary PGM, PPM | `pnm`, if the brightest level is not 255 or 65,535: OpenCV does not scale | |
| anything else (PNG, WebP, BMP ...) | OpenCV | Pillow |
| arrays | as they are | |

A file's name does not matter. All decoders give the same pixels for the same JPEG. Transparency is
dropped, not blended; palettes and grey become RGB; of 16 bits the upper 8 stay; 32 bits and floats
are refused. The orientation that a camera wrote into EXIF is ignored everywhere. An image of more
than `max_pixels` is refused by its header, before memory is taken for it (`limit`, `size`); arrays
are in memory already.

OpenCV's own threads are switched off when this module is imported, for the whole process: loaders
have a thread for each core already. simplejpeg and OpenCV let other Python threads run while they
work. What OpenCV logs of broken images is switched off, too (the error says it), unless
OPENCV_LOG_LEVEL asks for it. libpng's own lines go straight to standard error and stay, but for
those about color profiles (`png`).
"""

import os
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from allstep.data.image import jpeg
from allstep.data.image.by_pillow import decode_by_pillow
from allstep.data.image.jpeg_header import Odd
from allstep.data.image.limit import MAX_NBYTES, MAX_PIXELS, check_size
from allstep.data.image.pixels import Pixels, Region
from allstep.data.image.png import check_chunks, without_profile
from allstep.data.image.pnm import decode_scaled
from allstep.data.image.resize import Box
from allstep.data.image.size import size_of

cv2.setNumThreads(1)
if "OPENCV_LOG_LEVEL" not in os.environ:
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_FLAGS = {
    1: cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION,
    3: cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION,
}
_TIFF = (b"II*\0", b"MM\0*")


def decode(data: Any, channels: int = 3, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the whole image, in memory of its own.

    ValueError when `data` is not an image, a broken one, or one of more than `max_pixels`.
    """
    if _is_array(data):
        return _with_channels(data, channels).copy()
    code = _bytes(data)
    if not jpeg.is_jpeg(code):
        return _by_opencv(code, channels, max_pixels)
    try:
        return jpeg.decode_whole(code, channels, max_pixels)
    except Odd:
        return decode_by_pillow(code, channels, max_pixels)


def decode_part(
    data: Any,
    region_of: Callable[[int, int], Region],
    size: tuple[int, int],
    channels: int,
    max_pixels: int,
) -> tuple[Pixels, Box]:
    """Return an image that holds the part which `region_of(height, width)` names, and where in it
    that part is.

    The part is to become `size`: a JPEG may be decoded at a half, a quarter or an eighth. The image
    may be the data itself, or memory that the thread's next call writes over.

    Raises:
        ValueError: `data` is not an image, a broken one, or too large.
    """
    if _is_array(data):
        image = _with_channels(data, channels)
    elif not jpeg.is_jpeg(code := _bytes(data)):
        image = _by_opencv(code, channels, max_pixels)
    else:
        try:
            return jpeg.decode_part(code, region_of, size, channels, max_pixels)
        except Odd:
            image = decode_by_pillow(code, channels, max_pixels)
    return image, Box(*region_of(image.shape[0], image.shape[1]))


def _is_array(data: Any) -> bool:
    """Whether this is an image already; a flat array of bytes is an encoded one."""
    return isinstance(data, np.ndarray) and data.ndim > 1


def _bytes(data: Any) -> memoryview:
    try:
        code = memoryview(data).cast("B")
    except TypeError:
        raise ValueError(
            f"{type(data).__name__} is neither an encoded image nor an array of pixels"
        ) from None
    if len(code) > MAX_NBYTES:
        raise ValueError(f"too large: {len(code)} bytes, expected at most {MAX_NBYTES}")
    return code


def _with_channels(data: Any, channels: int) -> Pixels:
    """An array as (height, width, channels): grey repeated, or RGB made grey."""
    image: Pixels = data[..., None] if data.ndim == 2 else data
    if image.dtype != np.uint8 or image.ndim != 3:
        raise ValueError(
            f"a stored image is uint8 (height, width, channels), not {data.dtype} {data.shape}"
        )
    if image.shape[2] == channels:
        return image
    if image.shape[2] == 1:
        return np.repeat(image, channels, axis=2)
    if image.shape[2] == 3 and channels == 1:
        return np.asarray(cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY), np.uint8)[
            ..., None
        ]
    raise ValueError(f"an image of {image.shape[2]} channels cannot be given as {channels}")


def _by_opencv(code: memoryview, channels: int, max_pixels: int) -> Pixels:
    if not len(code):
        raise ValueError("no bytes at all")
    if bytes(code[:4]) in _TIFF:
        return decode_by_pillow(code, channels, max_pixels)
    if (scaled := decode_scaled(code, channels, max_pixels)) is not None:
        return scaled
    check_size(size_of(code), max_pixels)
    check_chunks(code)
    try:
        image = cv2.imdecode(np.frombuffer(without_profile(code), np.uint8), _FLAGS[channels])
    except cv2.error:
        image = None
    if image is None:
        return decode_by_pillow(code, channels, max_pixels)
    return np.asarray(image, np.uint8).reshape(*image.shape[:2], channels)
