"""Conversion of images for packing.

```
source format                    larger than max_side          not larger
JPEG                             decode, shrink, JPEG          unchanged bytes
PNG, WebP                        decode, shrink, same format   unchanged bytes
GIF, BMP, TIFF, PBM, PGM, PPM    decode, shrink, PNG           unchanged bytes
other formats                    decode, shrink, PNG           PNG, since tar has no suffix for them
                                                               that every reader knows
array                            shrink, PNG                   PNG
```

With `format="jpeg"` (or png, webp) images of other formats are converted to it, too; with
`raw=True` all images become pixels. Of an image that keeps its bytes only the header is read;
`allstep data verify` decodes all images. `max_side` applies to the longer side. Images are only
made smaller, never larger, by averaging over areas (OpenCV's INTER_AREA). JPEG is decoded at a
fraction of its size if that is still large enough.
"""

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from allstep.data.image.decode import decode
from allstep.data.image.limit import MAX_PIXELS, check_size
from allstep.data.image.size import Size
from allstep.data.image.size import size_of as header_size
from allstep.errors import ConfigError, did_you_mean

FORMATS = ("keep", "jpeg", "png", "webp")
SUFFIXES = {
    "jpeg": "jpg",
    "png": "png",
    "webp": "webp",
    "gif": "gif",
    "bmp": "bmp",
    "tiff": "tif",
    "pbm": "pbm",
    "pgm": "pgm",
    "ppm": "ppm",
}
_MAGIC = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
    b"P1": "pbm",
    b"P4": "pbm",
    b"P2": "pgm",
    b"P5": "pgm",
    b"P3": "ppm",
    b"P6": "ppm",
}
_QUALITIES = range(1, 101)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image as a shard stores it."""

    content: Any
    """The encoded bytes, or pixels if `kind` is "raw"."""
    shape: tuple[int, ...]
    """Height and width; for raw pixels also channels."""
    kind: str
    """Format of the content, such as "jpeg", or "raw"."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The user's options for images: which ones change, and to what."""

    max_side: int | None = None
    """Maximum length of the longer side in pixels; None keeps every size."""
    quality: int = 90
    """Quality of JPEG and WebP, 1 to 100."""
    raw: bool = False
    """Whether to store pixels instead of encoded images."""
    format: str = "keep"
    """Format of all images: "jpeg", "png" or "webp"; "keep" keeps the format of each."""
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels; a larger image is a bad sample, even if its bytes would be kept."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"--format {self.format}: {did_you_mean(self.format, FORMATS)}")
        if self.max_side is not None and self.max_side < 1:
            raise ConfigError(f"--max-side {self.max_side}: expected 1 pixel or more")
        if self.quality not in _QUALITIES:
            raise ConfigError(f"--quality is 1 to 100, not {self.quality}")
        if self.max_pixels < 1:
            raise ConfigError(f"--max-pixels {self.max_pixels}: expected 1 pixel or more")
        if self.raw and self.format != "keep":
            raise ConfigError(
                f"--raw stores pixels, --format {self.format} encodes them; give one of the two"
            )


def recode(data: Any, options: ImageOptions) -> StoredImage:
    """Return the converted `data`, an encoded image or an array.

    Raises ValueError if it is not an image.
    """
    if isinstance(data, np.ndarray) and data.ndim > 1:
        image = _checked(data)
        size = _scaled((image.shape[0], image.shape[1]), options.max_side)
        return _stored(image, "png", size, options)
    kind = kind_of(data)
    size = size_of(data, kind)
    check_size(size, options.max_pixels)
    smaller = _scaled(size, options.max_side)
    keeps_format = not options.raw and options.format in ("keep", kind) and kind in SUFFIXES
    if keeps_format and smaller == size:
        return StoredImage(data, size, kind)
    return _stored(_decode(data, kind, smaller, options.max_pixels), kind, smaller, options)


def kind_of(data: Any) -> str:
    """Return the format of an encoded image from its first bytes, or "other"."""
    head = bytes(data[:12])
    if head.startswith(b"RIFF") and head[8:] == b"WEBP":
        return "webp"
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "other")


def size_of(data: Any, kind: str) -> Size:
    """Return height and width from the header, without decoding."""
    if kind == "jpeg":
        try:
            height, width, *_ = simplejpeg.decode_jpeg_header(data)
            return int(height), int(width)
        except ValueError:
            # `header_size` reads unusual JPEGs, too.
            pass
    try:
        return header_size(data)
    except ValueError as error:
        raise ValueError(
            "is not an image of a known format" if kind == "other" else f"{kind}: {error}"
        ) from error


def _checked(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the array as (height, width, 1 or 3 channels); raise ValueError for others."""
    image = array[..., None] if array.ndim == 2 else array
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            f"expected uint8 (height, width[, 1 or 3]), found {array.dtype} {array.shape}"
        )
    return image


def _decode(data: Any, kind: str, size: Size, max_pixels: int) -> NDArray[np.uint8]:
    """Return the decoded image, in its own size or in a smaller one that is at least `size`."""
    if kind == "jpeg":
        try:
            # Scaling by less than 2 takes longer than no scaling.
            image: NDArray[np.uint8] = simplejpeg.decode_jpeg(
                data, "RGB", min_height=size[0], min_width=size[1], min_factor=2
            )
            return image
        except ValueError:
            # The slower decoders read unusual JPEGs; for a broken one, they raise the error.
            pass
    return decode(data, max_pixels=max_pixels)


def _scaled(size: Size, max_side: int | None) -> Size:
    """Return the new (height, width).

    The longer side is at most `max_side`; the aspect ratio is kept to within whole pixels.
    """
    longer = max(size)
    if max_side is None or longer <= max_side:
        return size
    height, width = (max(1, round(side * max_side / longer)) for side in size)
    return height, width


def _stored(image: NDArray[np.uint8], kind: str, size: Size, options: ImageOptions) -> StoredImage:
    """Return the image in `size`, as pixels or in the format that `options` request."""
    image = _resized(image, size)
    if options.raw:
        return StoredImage(np.ascontiguousarray(image).tobytes(), image.shape, "raw")
    kind = options.format if options.format != "keep" else kind
    kind = kind if kind in FORMATS else "png"
    return StoredImage(_encoded(image, kind, options.quality), size, kind)


def _resized(image: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    if image.shape[:2] == size:
        return image
    smaller = cv2.resize(image, (size[1], size[0]), interpolation=cv2.INTER_AREA)
    return smaller.reshape(*size, image.shape[2]).astype(np.uint8, copy=False)


def _encoded(image: NDArray[np.uint8], kind: str, quality: int) -> bytes:
    grey = image.shape[2] == 1
    if kind == "jpeg":
        image = np.ascontiguousarray(image)
        spaces = ("GRAY", "Gray") if grey else ("RGB", "420")
        return bytes(simplejpeg.encode_jpeg(image, quality, *spaces))
    options = [cv2.IMWRITE_WEBP_QUALITY, quality] if kind == "webp" else []
    try:
        done, encoded = cv2.imencode(f".{kind}", image if grey else image[..., ::-1], options)
    except cv2.error:
        # For instance, a side of a WebP has at most 16,383 pixels.
        done = False
    if not done:
        raise ValueError(f"an image of {image.shape} cannot be written as {kind}")
    return encoded.tobytes()
