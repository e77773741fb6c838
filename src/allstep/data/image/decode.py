"""Decode a stored sample to uint8 (height, width, channels): 3 channels (RGB) or 1 (grey).

| first bytes | decoder | if that fails |
|---|---|---|
| JPEG | simplejpeg (`jpeg`), only the rows of a crop | Pillow, but not for broken files |
| TIFF, AVIF, JPEG 2000, GIF, BMP | Pillow | |
| binary PGM, PPM with another maximum than 255 or 65,535 | `pnm`: OpenCV does not scale | |
| anything else (PNG, WebP ...) | OpenCV | Pillow |
| arrays | none, they are used as they are | |

Pillow decodes JPEGs with CMYK, unusual sampling or harmless warnings; a broken JPEG is an error at
once. OpenCV is not used for formats whose colors it gets wrong: of TIFF it returns strips that it
could not unpack and multiplies colors by the transparency; of AVIF with transparency it exchanges
red and blue; it does not convert JPEG 2000 from sYCC; of GIF it replaces transparent pixels, and it
misreads some masks of BMP.

A file's name does not matter. All decoders return the same pixels for the same JPEG. Transparency
is dropped, not blended; palettes and grey become RGB; of 16 bits the upper 8 are used; 32 bits and
floats are refused. The EXIF orientation is ignored everywhere. An image of more than `max_pixels`
is refused by its header, before memory is allocated for it (`limit`, `size`); arrays are in memory
already.

Importing this module switches off OpenCV's own threads for the whole process: loaders already use a
thread per core. simplejpeg and OpenCV release the GIL. OpenCV's log messages about broken images
are switched off too (the raised error has the reason), unless OPENCV_LOG_LEVEL is set. libpng
prints directly to standard error; this cannot be switched off, except for messages about color
profiles (`png`).
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
_JPEG_2000 = (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")
_FOR_PILLOW = (b"II*\0", b"MM\0*", b"GIF8", b"BM", *_JPEG_2000)
"""First bytes of TIFF, GIF, BMP and JPEG 2000."""


def decode(data: Any, channels: int = 3, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the whole image in new memory.

    `data` is an encoded image (bytes) or an array (height, width[, channels]); `channels` is 3
    (RGB) or 1 (grey). Raises ValueError if `data` is not an image, is broken, or has more than
    `max_pixels`.
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
    """Return an image that contains the region `region_of(height, width)`, and its box in it.

    The caller resizes the region to `size`, so a JPEG may be decoded at 1/2, 1/4 or 1/8 of its
    size. The image may be `data` itself, or memory that the thread's next call overwrites.

    Raises:
        ValueError: `data` is not an image, is broken, or has more than `max_pixels`.
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
    """Return whether `data` holds pixels; a flat array of bytes is an encoded image."""
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
    """Return an array as (height, width, channels), with grey repeated or RGB converted to grey."""
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
        grey = cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY)
        return np.asarray(grey, np.uint8)[..., None]
    raise ValueError(f"an image of {image.shape[2]} channels cannot be given as {channels}")


def _is_for_pillow(head: bytes) -> bool:
    """Return whether a file is of a format that OpenCV decodes wrongly. AVIF has its name later."""
    return head.startswith(_FOR_PILLOW) or head[4:11] == b"ftypavi"


def _by_opencv(code: memoryview, channels: int, max_pixels: int) -> Pixels:
    if not len(code):
        raise ValueError("no bytes at all")
    if _is_for_pillow(bytes(code[:16])):
        # Pillow takes the size of a GIF from its frames.
        check_size(size_of(code), max_pixels)
        return decode_by_pillow(code, channels, max_pixels)
    if (scaled := decode_scaled(code, max_pixels)) is not None:
        return _with_channels(scaled, channels)
    check_size(size_of(code), max_pixels)
    check_chunks(code)
    try:
        image = cv2.imdecode(np.frombuffer(without_profile(code), np.uint8), _FLAGS[channels])
    except cv2.error:
        image = None
    if image is None:
        return decode_by_pillow(code, channels, max_pixels)
    return np.asarray(image, np.uint8).reshape(*image.shape[:2], channels)
