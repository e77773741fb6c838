"""Read the size of an image from its header.

| first bytes | size from |
|---|---|
| JPEG | the frame segment, by `jpeg_header` or libjpeg |
| PNG, GIF, BMP, WebP | fixed offsets, read here (Pillow would allocate memory for a whole WebP) |
| TIFF, PPM and all others | Pillow, which reads headers when it opens a file and pixels later |

Pillow opens only the formats listed here: of its other formats, EPS would start another program.
Pillow's own limit (a warning from 89 million pixels on, an error from 179 million on) is not used
here, and remains unchanged for other code in the process.
"""

import io
import re
import struct
from typing import Any

from PIL import ExifTags, Image, UnidentifiedImageError

Size = tuple[int, int]

_FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF"),
    *("ICO", "PCX", "SGI", "SUN", "QOI", "PSD", "DDS", "XPM", "XBM", "IM", "TGA"),
)
_PNM = re.compile(rb"P[1-6]\s")
_PNM_HEADER = re.compile(rb"P[1-6](?:(?:\s|#[^\n]*\n)+\d{1,9}){2}\s")
_LONGEST_HEADER = 1 << 16
# Pillow's plugins raise these for content of another format.
_ANOTHER = (SyntaxError, IndexError, TypeError, struct.error)


def size_of(code: Any) -> Size:
    """Return (height, width) of a file other than JPEG; raise ValueError if it is not an image."""
    if size := _at_fixed_places(bytes(code[:30])):
        return size
    with opened(code) as image:
        return stored_size(image)


def stored_size(image: Image.Image) -> Size:
    """Return (height, width) of the stored pixels, without the orientation.

    Pillow states the size of a TIFF after its rotation.
    """
    if image.format == "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8):
        return image.width, image.height
    return image.height, image.width


def opened(code: Any) -> Image.Image:
    """Open a file with Pillow, which reads only its header; ValueError if it is not an image."""
    try:
        return _opened(code)
    except UnidentifiedImageError:
        raise ValueError(
            f"not an image: {len(code)} bytes that begin with {bytes(code[:8])!r}"
        ) from None
    # Pillow's plugins raise OSError, ValueError, EOFError ... for broken headers.
    except Exception as error:
        raise ValueError(f"broken image: {error}") from None


def _opened(code: Any) -> Image.Image:
    """Open a file as `Image.open` does, but without Pillow's limit."""
    Image.init()
    prefix = bytes(code[:16])
    if _PNM.match(prefix) and not _PNM_HEADER.match(bytes(code[:_LONGEST_HEADER])):
        # Pillow reads a header byte by byte, also comments of a gigabyte.
        raise ValueError(f"its header is incomplete after {_LONGEST_HEADER} bytes")
    for name in _FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))
        try:
            if factory is not None and (accepts is None or accepts(prefix) is True):
                return factory(io.BytesIO(code), "")
        except _ANOTHER:
            continue
    raise UnidentifiedImageError


def _at_fixed_places(head: bytes) -> Size | None:
    """Return (height, width) if the format has them at fixed offsets, else None."""
    if len(head) < 30:
        return None
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
        width, height = struct.unpack_from(">II", head, 16)
    elif head.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", head, 6)
    elif head.startswith(b"BM") and struct.unpack_from("<I", head, 14)[0] >= 40:
        # A negative height counts rows from the top.
        width, height = map(abs, struct.unpack_from("<ii", head, 18))
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp(head)
    else:
        return None
    return height, width


def _webp(head: bytes) -> Size | None:
    kind = head[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[27:30], "little"), 1 + int.from_bytes(head[24:27], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return height & 0x3FFF, width & 0x3FFF
    return None
