"""Check the chunks of PNG files and remove color profiles before decoding.

OpenCV's libpng checks an embedded color profile (the chunk `iCCP`) and prints warnings to standard
error, with the profile's name as in the file, which may contain escape sequences. The profile does
not change the pixels that OpenCV returns, so it is removed.

Decoders allocate memory by the length that a chunk states, before they notice that the file is
shorter: 4 KB can claim 4 GB. So stated lengths are checked.

A PNG is a signature of 8 bytes and chunks::

    length (4 bytes, big-endian) | kind (4 letters) | data | CRC (4 bytes)
"""

import re
from collections.abc import Iterator

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PROFILE = b"iCCP"
# Unlike `in`, a pattern searches the memory of any buffer without a copy.
_HAS_PROFILE = re.compile(_PROFILE)
# Bytes of length, kind and CRC.
_OVERHEAD = 12


_MAX_MISSING = 64 << 20
"""Maximum bytes by which a chunk may exceed the file, as in a truncated file."""


def check_chunks(code: memoryview) -> None:
    """Raise ValueError for a PNG with a chunk that is much longer than the file."""
    if code[:8] != _SIGNATURE:
        return
    for start, end, kind in _chunks(code):
        stated = int.from_bytes(code[start : start + 4], "big")
        if stated - (end - start) > _MAX_MISSING:
            raise ValueError(
                f"broken image: the chunk {kind!r} states {stated} bytes, {end - start} are left"
            )


def without_profile(code: memoryview) -> memoryview:
    """Return a PNG without its color profile; all other files unchanged."""
    if code[:8] != _SIGNATURE or not _HAS_PROFILE.search(code):
        return code
    parts = [code[start:end] for start, end, kind in _chunks(code) if kind != _PROFILE]
    return memoryview(b"".join([_SIGNATURE, *parts]))


def _chunks(code: memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Yield (start, end, kind) of each chunk; a truncated last chunk ends with the file."""
    start = len(_SIGNATURE)
    while start < len(code):
        end = start + _OVERHEAD + int.from_bytes(code[start : start + 4], "big")
        yield start, min(end, len(code)), bytes(code[start + 4 : start + 8])
        start = end
