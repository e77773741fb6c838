"""Reads files that another person or a damaged disk may have written, without waiting.

```
read_regular    the bytes of a regular file, at most `limit` of them
parse_json      plain values from JSON text, at most so deep, every number finite
read_json       both
read_lines      the lines of a regular file, one at a time, none longer than 16 MB
open_to_append  a file in a folder that another person may have prepared, to add lines to it
```

| refused | because |
|---|---|
| a pipe, socket, device or folder | opening a pipe waits for a writer; /dev/zero has no end |
| a file that is larger than `limit` | the memory of the reader |
| JSON of more than 50 levels | the parser and readers of the result recurse |
| NaN, infinities, 1e999, integers beyond 64 bits | arithmetic on them overflows, far from here |
| text that is not UTF-8, lone surrogates (`"\\ud800"`) | they cannot be printed or written again |

A file that cannot be read is an `OSError` whose `strerror` can be shown; contents that are refused
are a `ValueError`. A symbolic link counts as what it points to.
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
"""Bytes of a JSON file. State of an optimizer with 100,000 parameters takes 10 MB."""
MAX_LINE = 16 << 20
_LARGEST_INT = 1 << 64
# Shorter integers are below 64 bits.
_LONG_INT = re.compile(rb"[0-9]{20}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for anything else, without waiting."""
    # Without O_NONBLOCK, opening a pipe would wait until another process opens its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_to_append(path: Path) -> FileIO:
    """Open a file, or a new one, to append to it: not through a link, and without waiting for a
    pipe's reader."""
    # Through a link, another person's run folder could choose a file to write to.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return FileIO(os.open(path, flags, 0o666), "a")


def check_regular(descriptor: int, path: Path) -> None:
    """OSError unless the open file is a regular one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file, at most `limit`; OSError (EFBIG) for a larger one."""
    with open_regular(path) as file:
        # A file may grow after it was measured, so the read is bounded as well: by its size, since
        # a
        # read of `limit` bytes would reserve memory for so many.
        size = os.fstat(file.fileno()).st_size
        data: bytes | None = file.read(size + 1) if size <= limit else b""
        # Some files of /proc have the mode of a regular file, and wait for news like a pipe.
        if data is None:
            raise OSError(
                errno.EAGAIN, "is not a regular file: nothing is there to be read yet", str(path)
            )
        if size > limit or len(data) > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit:,} bytes, the limit here", str(path))
        return data


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """Return the value that JSON text spells. ValueError, of one line, for all that is refused.

    finite: refuse NaN and infinities. A record of a run may hold them, and its readers expect them.
    """
    # Calling `_int` for each of millions of integers takes most of the time of reading them.
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
    # Fewer brackets than levels are the usual case, and quickly counted.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise ValueError(f"is nested more than {MAX_DEPTH} levels deep")
    if _SURROGATE.search(data):
        # UnicodeEncodeError, a ValueError, for surrogates that are not a pair.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """Return the value in a JSON file. OSError when it cannot be read, ValueError when refused."""
    return parse_json(read_regular(path, limit))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, each with its end; the last one may lack it.

    A line longer than 16 MB ends the reading: what follows it is not looked for, since a file
    with holes may claim terabytes without one newline.
    """
    with open_regular(path) as file:
        while (line := file.readline(MAX_LINE)) and len(line) < MAX_LINE:
            yield line


def _int(text: str) -> int:
    # By length first: Python refuses to convert thousands of digits, with an error of its own.
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
    """Whether lists and dictionaries are nested deeper. Goes level by level, without recursion."""
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
