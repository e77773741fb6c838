"""Finds the members of a tar file, and as many as there are in a damaged one.

```
| header, 512 bytes | content, filled up to a multiple of 512 | header | ... | two blocks of zeros
  0 name   124 size   148 sum of all header bytes   156 type   257 "ustar"   345 prefix of the name
```

Sizes are octal digits, or binary where the first bit is set (GNU, 8 GB and more). A name of more than 100 bytes comes in a member of its
own in front: type L (GNU) holds just the name, type x (POSIX) lines like "30 path=...". After a header that does not agree with its sum,
the next block that is a sound header is searched for; what lies between is lost.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_BLOCK = 512
_FILES = b"0\x007"


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: where its header begins, and where its content lies."""

    name: str
    header: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A stretch with no sound member. `name` is known where only the content is cut."""

    header: int
    reason: str
    name: str = ""


def members(view: memoryview) -> Iterator[Member | Lost]:
    """All files in the tar whose bytes are `view`, in order."""
    position = begins = 0
    name, long_size = "", None
    while position < len(view):
        try:
            if _ends(view, position):
                return
            kind, size, short_name = _header(view, position)
        except ValueError as error:
            position = _search(view, position + _BLOCK)
            yield Lost(begins, f"{position - begins} bytes without a sound tar header: {error}")
            if position == len(view):
                return
            begins, name, long_size = position, "", None
            continue
        start, size = position + _BLOCK, size if long_size is None else long_size
        if start + size > len(view):
            reason = f"its {size} bytes are cut off: the file has {len(view) - start} of them"
            yield Lost(begins, reason, "" if kind in b"Lxg" else name or short_name)
            return
        position = start + -(-size // _BLOCK) * _BLOCK
        if kind == b"L":
            name = _text(bytes(view[start : start + size]))
        elif kind == b"x":
            name, long_size = _pax(bytes(view[start : start + size]), name)
        elif kind not in b"gK":
            if kind in _FILES:
                yield Member(name or short_name, begins, start, size)
            begins, name, long_size = position, "", None
    if len(view):
        yield Lost(min(begins, len(view)), f"the file ends at byte {len(view)} without a tar's end mark: it is cut off")


def _ends(view: memoryview, position: int) -> bool:
    """Whether only zeros follow. A block of zeros with more behind it is no end, but damage."""
    return not any(view[position : position + _BLOCK]) and not np.frombuffer(view, np.uint8, offset=position).any()


def _header(view: memoryview, position: int) -> tuple[bytes, int, str]:
    """Type, size and name of the header at `position`; ValueError when it is not sound."""
    block = bytes(view[position : position + _BLOCK])
    if len(block) < _BLOCK:
        raise ValueError(f"the file is cut off {len(block)} bytes behind its beginning")
    _check_sum(block)
    return block[156:157], _size(block), _name(block)


def _check_sum(block: bytes) -> None:
    expected = int(block[148:156].strip(b" \0") or b"0", 8)
    found = sum(block) - sum(block[148:156]) + 8 * 32
    if found != expected:
        raise ValueError(f"its bytes add up to {found}, it says {expected}")


def _size(block: bytes) -> int:
    field = block[124:136]
    size = int.from_bytes(field[1:], "big") if field[0] & 0x80 else int(field.strip(b" \0") or b"0", 8)
    if size < 0:
        raise ValueError(f"its size is {size}")
    return size


def _name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(block[:100])}" if prefix else _text(block[:100])


def _text(content: bytes) -> str:
    return content.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes, name: str) -> tuple[str, int | None]:
    """Name and size, as far as the lines "length key=value" speak of them."""
    size = None
    while content:
        digits, space, rest = content.partition(b" ")
        length = int(digits) if digits.isdigit() and space else 0
        if not len(digits) + 1 < length <= len(content):
            break
        key, _, value = rest[: length - len(digits) - 1].removesuffix(b"\n").partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size" and value.isdigit():
            size = int(value)
        content = content[length:]
    return name, size


def _search(view: memoryview, position: int) -> int:
    """The next block that is a sound header, or the file's end."""
    count = max(0, len(view) - position) // _BLOCK
    if not count:
        return len(view)
    blocks = np.frombuffer(view, np.uint8, count * _BLOCK, position).reshape(count, _BLOCK)
    for row in np.flatnonzero((blocks[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(axis=1)).tolist():
        try:
            _header(view, position + row * _BLOCK)
        except ValueError:
            continue
        return int(position + row * _BLOCK)
    return len(view)
