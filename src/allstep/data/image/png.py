"""Checks the chunks of PNG files, and takes color profiles out, before they are decoded.

OpenCV's libpng checks an embedded color profile (the chunk `iCCP`) and prints what it dislikes to
standard error, with the profile's name as the file has it: escape sequences included. The profile
does not change the pixels that OpenCV returns, so it is removed.

Decoders take memory for a chunk by the length that it states, before they see that the file is
shorter: 4 KB can claim 4 GB.

A PNG is a signature of 8 bytes and chunks::

    length (4 bytes, big-endian) | kind (4 letters) | data | CRC (4 bytes)
"""

import re
from collections.abc import Iterator

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PROFILE = b"iCCP"
# Unlike `in`, it searches the memory of any buffer without a copy.
_HAS_PROFILE = re.compile(_PROFILE)
# Length, kind and CRC.
_OVERHEAD = 12


_MOST_MISSING = 64 << 20
"""Bytes. A file that was cut short lacks less, or is refused in any case."""


def check_chunks(code: memoryview) -> None:
    """Raise ValueError for a PNG with a chunk that is much longer than the file."""
    if code[:8] != _SIGNATURE:
        return
    for start, end, kind in _chunks(code):
        stated = int.from_bytes(code[start : start + 4], "big")
        if stated - (end - start) > _MOST_MISSING:
            raise ValueError(
                f"broken image: the chunk {kind!r} states {stated} bytes, {end - start} are left"
            )


def without_profile(code: memoryview) -> memoryview:
    """Return the file without color profiles; other files, and PNGs without one, as they are."""
    if code[:8] != _SIGNATURE or not _HAS_PROFILE.search(code):
        return code
    parts = [code[start:end] for start, end, kind in _chunks(code) if kind != _PROFILE]
    return memoryview(b"".join([_SIGNATURE, *parts]))


def _chunks(code: memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Yield where each chunk starts and ends, and its kind.

    A cut one at the end is as long as it is.
    """
    start = len(_SIGNATURE)
    while start < len(code):
        end = start + _OVERHEAD + int.from_bytes(code[start : start + 4], "big")
        yield start, min(end, len(code)), bytes(code[start + 4 : start + 8])
        start = end
