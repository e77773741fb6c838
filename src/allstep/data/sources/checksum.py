"""CRC32C (Castagnoli), the checksum of TFRecord files and of allstep's indexes.

It is computed without a copy from any object with the buffer protocol. `masked` is TFRecord's form
of it: rotated, plus a constant, so that a checksum over bytes that contain checksums is still a
good one.
"""

from typing import Any

import google_crc32c
import numpy as np

_MASK_DELTA = 0xA282EAD8


def crc32c(content: Any) -> int:
    """Return the CRC32C of the bytes of `content`."""
    # google_crc32c accepts no memoryview, but an array over one.
    if not isinstance(content, bytes | np.ndarray):
        content = np.frombuffer(content, np.uint8) if len(content) else b""
    return int(google_crc32c.value(content))


def crc32c_on(crc: int, content: Any) -> int:
    """Return the CRC32C of some bytes, whose own CRC32C is `crc`, followed by `content`."""
    array = np.frombuffer(content, np.uint8) if len(content) else b""
    return int(google_crc32c.extend(crc, array))


def mask(crc: int) -> int:
    """Return TFRecord's form of a CRC32C."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def masked(content: Any) -> int:
    """Return the masked CRC32C of `content`, as TFRecord files store it."""
    return mask(crc32c(content))
