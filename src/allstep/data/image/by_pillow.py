"""Decode images with Pillow: TIFF, and all files that the faster decoders refuse.

Pillow differs from the rest of `image` in these points, which this module corrects:

* Pillow rotates a TIFF by its orientation tag. This module undoes that: orientation is ignored
  everywhere.
* Pillow clips values of more than 8 bits at 255. Here the upper 8 of 16 bits are used. Pixels of 32
  bits and floats have no range that a file states, so they are refused.
* Pillow does not limit the size of a TIFF's tiles, although it allocates memory for a whole tile.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from allstep.data.image.jpeg_header import check_scans
from allstep.data.image.limit import check_size
from allstep.data.image.pixels import Pixels
from allstep.data.image.size import opened

# Pillow warns about damaged EXIF data and sizes above its own limit. Both are harmless here; real
# faults raise an error.
warnings.filterwarnings("ignore", module=r"PIL\.")
_MODES = {1: "L", 3: "RGB"}
_TILE_WIDTH, _TILE_LENGTH = 322, 323
# Value of the orientation tag, and the function that undoes Pillow's rotation.
_TURN_BACK: dict[int, Callable[[Pixels], Pixels]] = {
    2: np.fliplr,
    3: lambda image: np.rot90(image, 2),
    4: np.flipud,
    5: lambda image: image.swapaxes(0, 1),
    6: np.rot90,
    7: lambda image: np.rot90(image.swapaxes(0, 1), 2),
    8: lambda image: np.rot90(image, -1),
}


def decode_by_pillow(code: memoryview, channels: int, max_pixels: int) -> Pixels:
    """Return the image as (height, width, channels).

    Raises ValueError if the image is broken or has more than `max_pixels`.
    """
    with opened(code) as image:
        check_size((image.height, image.width), max_pixels)
        if image.format in ("JPEG", "MPO"):
            check_scans(code)
        try:
            orientation = _prepare_tiff(image, max_pixels) if image.format == "TIFF" else None
            pixels = _pixels(image, _MODES[channels])
        except _Refused:
            raise
        # Pillow's plugins raise OSError, SyntaxError, struct.error, EOFError ... for broken files.
        except Exception as error:
            raise ValueError(f"broken image: {error}") from None
    pixels = pixels.reshape(*pixels.shape[:2], channels)
    turn_back = _TURN_BACK.get(orientation or 1)
    return np.ascontiguousarray(turn_back(pixels)) if turn_back else pixels


class _Refused(ValueError):
    """An intact image of a kind that is not supported."""


def _prepare_tiff(image: Any, max_pixels: int) -> int | None:
    """Check the size of the tiles, allocate the image, and return its orientation.

    Pillow does not check tiles, and would compare the image's size with its own limit.
    """
    tags = image.tag_v2
    if _TILE_WIDTH in tags and _TILE_LENGTH in tags:
        try:
            check_size((int(tags[_TILE_LENGTH]), int(tags[_TILE_WIDTH])), max_pixels)
        except ValueError as error:
            raise _Refused(f"tiles of this TIFF: {error}") from None
    orientation: int | None = tags.get(ExifTags.Base.Orientation)
    width, height = image.size[::-1] if orientation in (5, 6, 7, 8) else image.size
    # Allocated here, because Pillow would compare the size with its own limit first.
    image.im = Image.new(image.mode, (width, height)).im
    return orientation


def _pixels(image: Image.Image, mode: str) -> Pixels:
    # Pillow returns a PPM of 16 bits as 32-bit integers.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return _upper_half(np.array(image), mode)
    if image.mode in ("I", "F"):
        kind = "integers of 32 bits" if image.mode == "I" else "floating-point numbers"
        raise _Refused(f"its pixels are {kind}, and no file states their range; store 8 or 16 bits")
    return np.array(image.convert(mode))


def _upper_half(values: np.ndarray[Any, Any], mode: str) -> Pixels:
    grey = (values.astype(np.int64) >> 8).astype(np.uint8)
    return grey if mode == "L" else np.repeat(grey[..., None], 3, axis=2)
