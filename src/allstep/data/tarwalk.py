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
    position, begins = 0, 0
    name, size_from_pax = "", None
    while len(view) - position >= _BLOCK:
        block = bytes(view[position : position + _BLOCK])
        if not any(block):
            return
        try:
            size = _size(block) if size_from_pax is None else size_from_pax
            _check_sum(block)
        except ValueError as error:
            after = _search(view, position + _BLOCK)
            yield Lost(begins, f"{after - begins} bytes without a sound tar header: {error}")
            position = begins = after
            name, size_from_pax = "", None
            continue
        kind, start = block[156:157], position + _BLOCK
        if start + size > len(view):
            found = name or _name(block)
            yield Lost(
                begins,
                f"its {size} bytes are cut off: the file has {len(view) - start} of them",
                "" if kind in b"Lxg" else found,
            )
            return
        content = view[start : start + size]
        position = start + -(-size // _BLOCK) * _BLOCK
        if kind == b"L":
            name = bytes(content).split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        elif kind == b"x":
            name, size_from_pax = _pax(bytes(content), name)
        elif kind not in b"gK":
            if kind in _FILES:
                yield Member(name or _name(block), begins, start, size)
            name, size_from_pax = "", None
            begins = position
    if len(view):
        yield Lost(
            min(begins, len(view)), f"the file ends at byte {len(view)}, without a tar's end mark: it is cut off"
        )


def _check_sum(block: bytes) -> None:
    expected = int(block[148:156].strip(b" \0") or b"0", 8)
    found = sum(block) - sum(block[148:156]) + 8 * 32
    if found != expected:
        raise ValueError(f"its bytes add up to {found}, it says {expected}")


def _size(block: bytes) -> int:
    field = block[124:136]
    return int.from_bytes(field[1:], "big") if field[0] & 0x80 else int(field.strip(b" \0") or b"0", 8)


def _name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


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
    count = max(0, (len(view) - position) // _BLOCK)
    blocks = (
        np.frombuffer(view, np.uint8, count * _BLOCK, position).reshape(count, _BLOCK)
        if count
        else np.empty((0, _BLOCK), np.uint8)
    )
    for row in np.flatnonzero((blocks[:, 257:262] == np.frombuffer(b"ustar", np.uint8)).all(axis=1)).tolist():
        block = blocks[row].tobytes()
        try:
            _size(block)
            _check_sum(block)
        except ValueError:
            continue
        return int(position + row * _BLOCK)
    return len(view)
