"""Find the members of a tar file; in a damaged file, all that are intact.

```
| header, 512 bytes | content, padded to a multiple of 512 | header | ... | two blocks of zeros
  0 name   124 size   148 sum of all header bytes   156 type   257 "ustar"   345 prefix of the name
```

Sizes are octal digits, or binary if the first byte is 0x80 (GNU, 8 GB and more). A name of more
than 100 bytes is in a separate member before it: type L (GNU) contains only the name, type x
(POSIX) lines such as "30 path=...".

**Damage** costs the member that it is in; the scan continues with the next block that is a sound
header:

| damaged | lost |
|---|---|
| a header with a wrong sum, or whose size is no number or negative | all up to the next header |
| lines of a type x member, such as a size of thousands of digits | the member that they describe |
| a size that exceeds the rest of the file | this member; at a cut end nothing follows it |
| more zeros at the end than the end mark of a tar has | unknown: they may have been members |

A search proceeds window by window and skips runs of zeros, so that neither a large file nor many
damaged places make it slow.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from allstep.data.sources.zeros import end_of_zeros

_BLOCK = 512
_FILES = b"0\x007"
_WINDOW = 1 << 22
# A larger extended header is damage: Linux allows 4,096 bytes per path and 64 KB per attribute.
_MAX_EXTENSION = 1 << 20
# Two blocks, filled up to a record of 20 blocks: what GNU tar, bsdtar and Python write.
_LONGEST_END = 2 * _BLOCK + 20 * _BLOCK
# Digits of a 64-bit number.
_MAX_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: the offset of its header, and offset and size of its content."""

    name: str
    header: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A range of a tar without a sound member, from offset `header` on.

    `name` is known if only the content is cut.
    """

    header: int
    reason: str
    name: str = ""


def members(view: memoryview) -> Iterator[Member | Lost]:
    """Yield all files of the tar whose bytes are `view`, in order, and the lost ranges."""
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
    """Name and size that members of type L and x give the member after them."""

    name: str = ""
    size: int | None = None
    problem: str = ""

    def extended(self, kind: bytes, content: bytes) -> "_About":
        """Return this with the values of one more member of type L or x added."""
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
    if extends and size > _MAX_EXTENSION:
        return f"its extended header has {size} bytes, expected at most {_MAX_EXTENSION}"
    return ""


def _behind(view: memoryview, start: int, size: int) -> int:
    """Return where the scan continues after a lost member, whose size may be right or wrong."""
    end = start + -(-size // _BLOCK) * _BLOCK
    try:
        if end < len(view) and (_ends(view, end) or _header(view, end)):
            return end
    except ValueError:
        pass
    return _search(view, start)


def _ends(view: memoryview, position: int) -> bool:
    """Return whether only zeros follow. Zeros with other bytes after them are damage, no end."""
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
    """Return type, size and name of the header at `position`; ValueError if it is not sound."""
    block = bytes(view[position : position + _BLOCK])
    if len(block) < _BLOCK:
        raise ValueError(f"the file is cut off {len(block)} bytes after its start")
    _check_sum(block)
    return block[156:157], _size(block), _name(block)


def _check_sum(block: bytes) -> None:
    expected = _octal(block[148:156], "sum")
    found = sum(block) - sum(block[148:156]) + 8 * 32
    if found != expected:
        raise ValueError(f"the sum of its bytes is {found}, expected {expected}")


def _size(block: bytes) -> int:
    field = block[124:136]
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    # Any other first byte with the top bit set means a negative number, or no number.
    return _octal(field, "size")


def _octal(field: bytes, what: str) -> int:
    """Return the number in a field of octal digits with spaces or zero bytes around them."""
    digits = field.strip(b" \0")
    # int() would also accept signs, underscores and a leading 0o.
    if digits.strip(b"01234567"):
        raise ValueError(f"its {what} is {field!r}, expected octal digits")
    return int(digits or b"0", 8)


def _name(block: bytes) -> str:
    prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
    return f"{prefix}/{_text(block[:100])}" if prefix else _text(block[:100])


def _text(content: bytes) -> str:
    return content.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes, about: _About) -> _About:
    """Return `about` with the name and size that lines of "length key=value" give.

    Raise ValueError if `content` has no such lines.
    """
    position = 0
    while position < len(content) and content[position]:
        digits = content[position : position + _MAX_DIGITS + 1].partition(b" ")[0]
        start, end = position + len(digits) + 1, position + _decimal(digits, "the length of a line")
        if not start < end <= len(content):
            raise ValueError(f"a line at byte {position} ends at byte {end} of {len(content)}")
        key, _, value = content[start:end].removesuffix(b"\n").partition(b"=")
        if key == b"path":
            about = replace(about, name=value.decode("utf-8", "surrogateescape"))
        elif key == b"size":
            about = replace(about, size=_decimal(value, "the size"))
        position = end
    return about


def _decimal(digits: bytes, what: str) -> int:
    """Return the number in some decimal digits; ValueError, which names `what`, for others."""
    # Without this limit, int() raises an error of its own from 4,301 digits on.
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        more = f" ... ({len(digits)} bytes)" if len(digits) > _MAX_DIGITS else ""
        shown = f"{digits[:_MAX_DIGITS]!r}{more}"
        raise ValueError(f"{what} is {shown}, expected 1 to {_MAX_DIGITS} digits")
    return int(digits)


def _search(view: memoryview, position: int) -> int:
    """Return the offset of the next block that is a sound header, or the end of the file."""
    magic = np.frombuffer(b"ustar", np.uint8)
    while len(view) - position >= _BLOCK:
        # Headers are at multiples of a block from `position` on; none is all zeros.
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
