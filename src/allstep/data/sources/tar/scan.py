"""Finds the members of a tar file, and as many as there are in a damaged one.

```
| header, 512 bytes | content, filled up to a multiple of 512 | header | ... | two blocks of zeros
  0 name   124 size   148 sum of all header bytes   156 type   257 "ustar"   345 prefix of the name
```

Sizes are octal digits, or binary where the first byte is 0x80 (GNU, 8 GB and more). A name of more
than 100 bytes comes in a member of its own in front: type L (GNU) holds just the name, type x
(POSIX) lines like "30 path=...".

**Damage** costs the member that it is in; the walk continues with the next block that is a sound
header:

| damaged | lost |
|---|---|
| a header that does not agree with its sum, or whose size is no number (or negative) | all up to the next sound header |
| lines of a type x member that cannot be read, such as a size of thousands of digits | the member that they describe |
| a size that goes beyond the end of the file | this member; at a cut end nothing follows it |
| more zeros at the end than the end mark of a tar has | unknown: they may have been members |

A search goes through the file window by window and passes over runs of zeros, so that neither a
large file nor many damaged places in it make it slow.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from allstep.data.sources.zeros import end_of_zeros

_BLOCK = 512
_FILES = b"0\x007"
_WINDOW = 1 << 22
# More is damage: Linux allows 4,096 bytes for a path and 64 KB for an attribute.
_LONGEST_EXTENSION = 1 << 20
# Two blocks, filled up to a record of 20 blocks: what GNU tar, bsdtar and Python write.
_LONGEST_END = 2 * _BLOCK + 20 * _BLOCK
_MOST_DIGITS = 20  # of a 64-bit number


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
    """Yield all files in the tar `view`, in order, and what is lost between them."""
    position = begins = 0
    about = _About()
    while position < len(view):
        try:
            if _ends(view, position):
                yield from _long_end(view, position)
                return
            kind, size, short_name = _header(view, position)
        except ValueError as error:
            position = _search(view, position + _BLOCK)
            yield Lost(begins, f"{position - begins} bytes without a sound tar header: {error}")
            if position == len(view):
                return
            begins, about = position, _About()
            continue
        start, size = position + _BLOCK, size if about.size is None else about.size
        extends = kind in b"Lxg"
        problem = about.problem or _size_problem(size, len(view) - start, extends)
        if problem:
            position = _behind(view, start, size)
            yield Lost(begins, problem, "" if extends else about.name or short_name)
            if position == len(view):
                return
            begins, about = position, _About()
            continue
        position = start + -(-size // _BLOCK) * _BLOCK
        if kind in b"Lx":
            about = about.extended(kind, bytes(view[start : start + size]))
        elif kind not in b"gK":
            if kind in _FILES:
                yield Member(about.name or short_name, begins, start, size)
            begins, about = position, _About()
    reason = f"the file ends at byte {len(view)} without a tar's end mark: it is cut off"
    yield Lost(min(begins, len(view)), reason)


@dataclass(frozen=True, slots=True)
class _About:
    """What members of type L and x say of the member behind them."""

    name: str = ""
    size: int | None = None
    problem: str = ""

    def extended(self, kind: bytes, content: bytes) -> "_About":
        if kind == b"L":
            return replace(self, name=_text(content))
        try:
            return _pax(content, self)
        except ValueError as error:
            return replace(self, problem=f"its extended header cannot be read: {error}")


def _size_problem(size: int, left: int, extends: bool) -> str:
    """Return why no member can have `size` bytes where `left` follow its header; "" if one can."""
    if size > left:
        return f"its {size} bytes are cut off: the file has {left} of them"
    if extends and size > _LONGEST_EXTENSION:
        return f"its extended header has {size} bytes, expected at most {_LONGEST_EXTENSION}"
    return ""


def _behind(view: memoryview, start: int, size: int) -> int:
    """Return where the walk continues behind a lost member, whose size may be right or wrong."""
    end = start + -(-size // _BLOCK) * _BLOCK
    try:
        if end < len(view) and (_ends(view, end) or _header(view, end)):
            return end
    except ValueError:
        pass
    return _search(view, start)


def _ends(view: memoryview, position: int) -> bool:
    """Whether only zeros follow. A block of zeros with more behind it is no end, but damage."""
    return not any(view[position : position + _BLOCK]) and end_of_zeros(view, position) == len(view)


def _long_end(view: memoryview, position: int) -> Iterator[Lost]:
    """Yield what may be lost where more zeros follow than a tar ends with."""
    zeros = len(view) - position
    if zeros > _LONGEST_END:
        yield Lost(
            position,
            f"{zeros} bytes of zeros up to the end of the file, expected at most {_LONGEST_END}:"
            " members may have been overwritten; copy the file again",
        )


def _header(view: memoryview, position: int) -> tuple[bytes, int, str]:
    """Type, size and name of the header at `position`; ValueError when it is not sound."""
    block = bytes(view[position : position + _BLOCK])
    if len(block) < _BLOCK:
        raise ValueError(f"the file is cut off {len(block)} bytes behind its beginning")
    _check_sum(block)
    return block[156:157], _size(block), _name(block)


def _check_sum(block: bytes) -> None:
    expected = _octal(block[148:156], "sum")
    found = sum(block) - sum(block[148:156]) + 8 * 32
    if found != expected:
        raise ValueError(f"its bytes add up to {found}, it says {expected}")


def _size(block: bytes) -> int:
    field = block[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    # All other first bytes with the top bit set are negative numbers, or no numbers at all.
    return _octal(field, "size")


def _octal(field: bytes, what: str) -> int:
    """The number in a field of octal digits, with spaces or zero bytes around it."""
    digits = field.strip(b" \0")
    # int() would also take signs, underscores and a leading 0o.
    if digits.strip(b"01234567"):
        raise ValueError(f"its {what} is {field!r}, expected octal digits")
    return int(digits or b"0", 8)


def _name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(block[:100])}" if prefix else _text(block[:100])


def _text(content: bytes) -> str:
    return content.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes, about: _About) -> _About:
    """Return `about` with the name and size that the lines "length key=value" give.

    ValueError where they are no such lines.
    """
    position = 0
    while position < len(content) and content[position]:
        digits = content[position : position + _MOST_DIGITS + 1].partition(b" ")[0]
        end = position + _decimal(digits, "the length of a line")
        if not position + len(digits) + 1 < end <= len(content):
            raise ValueError(f"a line at byte {position} ends at byte {end} of {len(content)}")
        key, _, value = (
            content[position + len(digits) + 1 : end].removesuffix(b"\n").partition(b"=")
        )
        if key == b"path":
            about = replace(about, name=value.decode("utf-8", "surrogateescape"))
        elif key == b"size":
            about = replace(about, size=_decimal(value, "the size"))
        position = end
    return about


def _decimal(digits: bytes, what: str) -> int:
    # Without this limit int() raises an error of its own from 4,301 digits on.
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        shown = f"{digits[:_MOST_DIGITS]!r}" + (
            f" ... ({len(digits)} bytes)" if len(digits) > _MOST_DIGITS else ""
        )
        raise ValueError(f"{what} is {shown}, expected 1 to {_MOST_DIGITS} digits")
    return int(digits)


def _search(view: memoryview, position: int) -> int:
    """The next block that is a sound header, or the file's end."""
    magic = np.frombuffer(b"ustar", np.uint8)
    while len(view) - position >= _BLOCK:
        # Headers stand at multiples of a block from `position` on; none is all zeros.
        position += (end_of_zeros(view, position) - position) // _BLOCK * _BLOCK
        count = min(_WINDOW, len(view) - position) // _BLOCK
        blocks = np.frombuffer(view, np.uint8, count * _BLOCK, position).reshape(count, _BLOCK)
        for row in np.flatnonzero((blocks[:, 257:262] == magic).all(axis=1)).tolist():
            try:
                _header(view, position + row * _BLOCK)
            except ValueError:
                continue
            return int(position + row * _BLOCK)
        position += count * _BLOCK
    return len(view)
