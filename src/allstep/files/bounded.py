"""Reads untrusted or damaged files within limits, and without waiting.

```
read_regular    return the bytes of a regular file, at most `limit`
parse_json      return plain values from JSON text of bounded depth, with finite numbers
read_json       both
read_lines      yield the lines of a regular file, none longer than 16 MB
open_to_append  open a file to append to it, in a folder that another user may have prepared
```

| refused | reason |
|---|---|
| a pipe, socket, device or folder | opening a pipe waits for a writer; /dev/zero has no end |
| a file that is larger than `limit` | the memory of the reader |
| JSON of more than 50 levels | the parser and readers of the result recurse |
| NaN, infinities, 1e999, integers beyond 64 bits | arithmetic on them overflows, far from here |
| text that is not UTF-8, lone surrogates (`"\\ud800"`) | they cannot be printed or written again |

A file that cannot be read raises `OSError` with a `strerror` fit for a message; refused contents
raise `ValueError`. Symbolic links are followed, except by `open_to_append`.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

MAX_DEPTH = 50
MAX_JSON = 64 << 20
"""Upper limit of the bytes of a JSON file. The state of an optimizer with 100,000 parameters takes
10 MB."""
MAX_LINE = 16 << 20
_LARGEST_INT = 1 << 64
# An integer of 20 digits or more may exceed 64 bits.
_LONG_INT = re.compile(rb"[0-9]{20}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; raise OSError for anything else, without waiting."""
    # Without O_NONBLOCK, opening a pipe would wait until another process opens its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_to_append(path: Path) -> FileIO:
    """Open a file to append to it, created if needed.

    Raises OSError for a symbolic link, and for a pipe without a reader instead of waiting for one.
    """
    # Through a link, a run folder of another user could choose the file to write to.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "a")


def check_regular(descriptor: int, path: Path) -> None:
    """Raise OSError unless the open file is a regular one; `path` is for the error."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file, at most `limit`; OSError (EFBIG) for a larger one."""
    with open_regular(path) as file:
        # The file may grow after fstat, so the read is bounded too: by the size, since a read of
        # `limit` bytes would reserve memory for all of them.
        size = os.fstat(file.fileno()).st_size
        data: bytes | None = file.read(size + 1) if size <= limit else b""
        # Some files of /proc have the mode of a regular file, but wait for data like a pipe.
        if data is None:
            raise OSError(
                errno.EAGAIN, "is not a regular file: it has no data to read yet", str(path)
            )
        if size > limit or len(data) > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes, the limit here", str(path))
        return data


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """Return the value of a JSON text; ValueError, of one line, for anything refused.

    finite: refuse NaN and infinities (default). A run record may hold them, and its readers expect
    them.
    """
    # A call of `_int` for each of millions of integers would take most of the time of reading.
    to_int = _int if _LONG_INT.search(data) else None
    try:
        value = json.loads(
            data.decode(),
            parse_int=to_int,
            parse_float=_float if finite else None,
            parse_constant=_refuse if finite else None,
        )
    except RecursionError:
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep") from None
    # The usual text has fewer brackets than MAX_DEPTH; counting them is cheap.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
    if _SURROGATE.search(data):
        # Raises UnicodeEncodeError, a ValueError, for a surrogate without its pair.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """Return the value of a JSON file; OSError if it cannot be read, ValueError if refused."""
    return parse_json(read_regular(path, limit))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file with their newlines; the last line may lack it.

    A line longer than 16 MB ends the reading, because a sparse file may claim terabytes without a
    newline.
    """
    with open_regular(path) as file:
        while (line := file.readline(MAX_LINE)) and len(line) < MAX_LINE:
            yield line


def _int(text: str) -> int:
    # The length is checked first: Python refuses to convert thousands of digits with its own error.
    if len(text) > 21 or not -_LARGEST_INT < (value := int(text)) < _LARGEST_INT:
        raise ValueError(f"holds an integer of {len(text)} digits, beyond 64 bits")
    return value


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"holds the number {text[:20]}, which is beyond a float")
    return value


def _refuse(text: str) -> Any:
    raise ValueError(f"holds {text}, which is not JSON")


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and dicts are nested deeper than `levels`, without recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner for each in layer for inner in _inside(each) if isinstance(inner, list | dict)
        ]
        if not layer:
            return False
    return True


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
