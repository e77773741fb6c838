"""idx files: the array format of MNIST and its descendants, plain or gzip-compressed.

```
byte 0, 1   zero
byte 2      type of an element: 0x08 uint8, 0x09 int8, 0x0B int16, 0x0C int32, 0x0D float32,
            0x0E float64
byte 3      number of dimensions d
4 x d       the dimensions, big-endian uint32; the first is the number of samples
rest        the elements, big-endian, the last dimension fastest
```

`read` returns an array: memory-mapped for a plain file, so that the ranks of a host share the
pages, unpacked into memory for a `.gz`. Any error in a file raises a `DataError` with its name and
the bytes expected and found.
"""

import gzip
import io
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.console.quantities import nbytes
from allstep.errors import DataError
from allstep.machine import memory

_TYPES: Mapping[int, str] = {
    0x08: ">u1",
    0x09: ">i1",
    0x0B: ">i2",
    0x0C: ">i4",
    0x0D: ">f4",
    0x0E: ">f8",
}
# The limit of numpy 1.
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 60
# Largest number of bytes that gzip unpacks from one byte.
_MAX_RATIO = 1032
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def read(path: Path) -> NDArray[Any]:
    """Return the array of the idx file at `path`, read-only.

    A mapped array is big-endian, as stored; an unpacked one has the machine's byte order.
    """
    try:
        return _read_packed(path) if path.suffix == ".gz" else _map_plain(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: does not fit into memory; unpack it (gunzip): plain files are mapped"
        ) from error


def read_pair(images: Path, labels: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the arrays of two idx files; raise DataError unless there is one label per image."""
    pixels, numbers = read(images), read(labels)
    if 0 in pixels.shape[1:]:
        raise DataError(
            f"{images}: expected images with 1 pixel or more, found shape {pixels.shape}"
        )
    if numbers.ndim != 1:
        raise DataError(
            f"{labels}: expected labels with 1 dimension, found {numbers.ndim}: shape"
            f" {numbers.shape}"
        )
    if pixels.ndim < 2:
        raise DataError(
            f"{images}: expected images with 2 dimensions or more, found shape {pixels.shape}"
        )
    if len(pixels) != len(numbers):
        raise DataError(
            f"{labels}: expected {len(pixels)} labels, as many as images in {images.name},"
            f" found {len(numbers)}"
        )
    return pixels, numbers


def write(path: Path, array: NDArray[Any]) -> None:
    """Write `array` as an idx file, compressed if the name ends in `.gz`.

    Equal arrays give equal bytes: the compressed file contains no time.
    """
    stored = array.astype(array.dtype.newbyteorder(">"))
    code = _CODES[">" + stored.dtype.str[1:]]
    content = (
        bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes() + stored.tobytes()
    )
    path.write_bytes(gzip.compress(content, 9, mtime=0) if path.suffix == ".gz" else content)


def _map_plain(path: Path) -> NDArray[Any]:
    with path.open("rb") as file:
        dtype, shape = _header(file, path)
        start = file.tell()
    _check_length(path, start + _nbytes(dtype, shape), path.stat().st_size)
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape)


def _read_packed(path: Path) -> NDArray[Any]:
    try:
        with gzip.open(path) as file:
            dtype, shape = _header(file, path)
            start, expected = file.tell(), _nbytes(dtype, shape)
            _check_memory(path, expected)
            content = _read_up_to(file, expected)
            trailing = len(file.read(1 << 16)) if len(content) == expected else 0
    # The array is complete, but gzip's checksum after it is not.
    except EOFError as error:
        raise DataError(
            f"{path}: is truncated: its {path.stat().st_size} bytes end before gzip's checksum"
        ) from error
    except gzip.BadGzipFile as error:
        raise DataError(f"{path}: is not a complete gzip file ({error})") from error
    except zlib.error as error:
        raise DataError(f"{path}: its compressed bytes are damaged ({error})") from error
    if trailing:
        _check_length(path, start + expected, start + expected + trailing)
    _check_length(path, start + expected, start + len(content), "unpacked ")
    array = np.frombuffer(content, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _check_memory(path: Path, expected: int) -> None:
    """Raise DataError if `expected` unpacked bytes exceed what the file can hold, or the memory."""
    packed = path.stat().st_size
    if expected > _MAX_RATIO * packed:
        raise DataError(
            f"{path}: is truncated: expected {expected} unpacked bytes, found {packed} packed ones"
        )
    free = memory().available
    # The array is in memory twice for a moment.
    if 2 * expected > free:
        raise DataError(
            f"{path}: its {nbytes(packed)} unpack to {nbytes(expected)}, and {nbytes(free)} of"
            " memory are free; unpack it (gunzip): plain files are mapped"
        )


def _read_up_to(file: io.BufferedReader | gzip.GzipFile, expected: int) -> bytes:
    """Return `expected` bytes, or fewer if the file ends earlier or its compressed stream is cut.

    `read1` returns the bytes before a cut; `read` would discard them.
    """
    content = bytearray()
    try:
        while len(content) < expected and (
            chunk := file.read1(min(1 << 20, expected - len(content)))
        ):
            content += chunk
    # gzip raises this for a stream without its end.
    except EOFError:
        pass
    return bytes(content)


def _header(
    file: io.BufferedReader | gzip.GzipFile, path: Path
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read the header of an idx file; return element type and shape."""
    magic = _read_up_to(file, 4)
    if len(magic) < 4:
        raise DataError(f"{path}: expected at least 4 bytes of an idx header, found {len(magic)}")
    if magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
        expected = "0x0000, a type of 0x08 to 0x0E, a number of dimensions"
        raise DataError(
            f"{path}: is not an idx file: expected to begin with {expected}; found 0x{magic.hex()}"
        )
    if magic[3] > _MAX_DIMENSIONS:
        raise DataError(f"{path}: expected at most {_MAX_DIMENSIONS} dimensions, found {magic[3]}")
    sizes = _read_up_to(file, 4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise DataError(
            f"{path}: expected {4 + 4 * magic[3]} bytes of idx header, found {4 + len(sizes)}"
        )
    shape = tuple(np.frombuffer(sizes, ">u4").tolist())
    # numpy rejects such shapes even if one of the dimensions is 0.
    if math.prod(size for size in shape if size) >= _MAX_ELEMENTS:
        raise DataError(f"{path}: its dimensions {shape} are too large for any file: damaged")
    return np.dtype(_TYPES[magic[2]]), shape


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * math.prod(shape)


def _check_length(path: Path, expected: int, found: int, unit: str = "") -> None:
    if found < expected:
        raise DataError(f"{path}: is truncated: expected {expected} {unit}bytes, found {found}")
    if found > expected:
        raise DataError(f"{path}: has trailing bytes: expected {expected}, found at least {found}")
