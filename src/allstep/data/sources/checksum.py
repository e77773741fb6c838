"""CRC32C (Castagnoli), the checksum of TFRecord files and of our own indexes, of anything with the
buffer protocol, without a copy.

`masked` is TFRecord's form of it: rotated and moved by a constant, so that the checksum of bytes
that hold checksums is still a good one.
"""

from typing import Any

import google_crc32c
import numpy as np

_MASK_DELTA = 0xA282EAD8


def crc32c(content: Any) -> int:
    """CRC32C of the bytes of `content`."""
    if not isinstance(
        content, bytes | np.ndarray
    ):  # the library takes no memoryview, but an array over one
        content = np.frombuffer(content, np.uint8) if len(content) else b""
    return int(google_crc32c.value(content))


def crc32c_on(crc: int, content: Any) -> int:
    """CRC32C of some bytes, whose checksum is `crc`, and those of `content` behind them."""
    array = np.frombuffer(content, np.uint8) if len(content) else b""
    return int(google_crc32c.extend(crc, array))


def mask(crc: int) -> int:
    """TFRecord's form of a CRC32C."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def masked(content: Any) -> int:
    """The masked CRC32C of `content`, as TFRecord files hold it."""
    return mask(crc32c(content))
