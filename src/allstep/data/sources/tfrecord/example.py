"""tf.train.Example: named features in protobuf's wire format, without protobuf and TensorFlow.

```
Example   1: Features
Features  1: entry (1: name, 2: Feature), repeated
Feature   1: BytesList | 2: FloatList | 3: Int64List
...List   1: value, repeated

A field is a tag (number << 3 | wire type) as a varint, then its content by wire type:
0    a varint: 7 bits per byte, lowest first; the top bit means that another byte follows
1    8 bytes
2    a length as a varint, then that many bytes
5    4 bytes
```

Numbers of a list are packed (all in one field of type 2) or in one field each; both are read,
packed is written. As protobuf demands, unknown fields are skipped, and the last of several fields
with the same name or kind counts. `encode` sorts the names, so equal features give equal bytes.
Malformed input raises a ValueError: each step moves forward and stays inside its message, so
decoding always ends.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | memoryview
Value: TypeAlias = list[Any] | NDArray[np.float32] | NDArray[np.int64]
"""Values of a feature: a list of bytes (views if the record is a view), or an array of float32 or
int64; an empty list for an empty feature."""

_BYTES, _FLOATS, _INTS = 1, 2, 3
# Bytes of packed integers from which numpy is quicker.
_MANY = 64
_UINT64 = (1 << 64) - 1


def encode(features: Mapping[str, Any]) -> bytes:
    """Return the Example with these features by name.

    A value is bytes, text or a number, or a list or array of one of these.
    """
    entries = (
        _field(1, _field(1, name.encode()) + _field(2, _feature(name, features[name])))
        for name in sorted(features)
    )
    return _field(1, b"".join(entries))


def decode(record: Buffer, wanted: Collection[str] | None = None) -> dict[str, Value]:
    """Return the features of an Example by name, or only the `wanted` ones that it contains."""
    return {
        name: _values(record, start, stop) for name, (start, stop) in spans(record, wanted).items()
    }


def spans(record: Buffer, wanted: Collection[str] | None = None) -> dict[str, tuple[int, int]]:
    """Return start and end of the `wanted` features in the record, without decoding them."""
    found: dict[str, tuple[int, int]] = {}
    position, end = 0, len(record)
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag == 0x0A:
            _entries(record, start, position, wanted, found)
    return found


def _entries(
    record: Buffer,
    position: int,
    end: int,
    wanted: Collection[str] | None,
    found: dict[str, tuple[int, int]],
) -> None:
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag == 0x0A:
            name, span = _entry(record, start, position)
            if wanted is None or name in wanted:
                found[name] = span


def _entry(record: Buffer, position: int, end: int) -> tuple[str, tuple[int, int]]:
    name, span = "", (end, end)
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag == 0x0A:
            name = str(record[start:position], "utf-8")
        elif tag == 0x12:
            span = (start, position)
    return name, span


def next_field(record: Buffer, position: int, end: int) -> tuple[int, int, int]:
    """Return the tag of the field at `position`, and start and end of its content."""
    tag = record[position]
    # Fast path for most fields, which have a short name or value; the code below gives the same.
    if tag & 0x87 == 2 and tag > 7 and position + 1 < end:
        stop = position + 2 + record[position + 1]
        if record[position + 1] < 0x80 and stop <= end:
            return tag, position + 2, stop
    tag, position = _varint(record, position, end) if tag & 0x80 else (tag, position + 1)
    if tag < 8:
        raise ValueError(
            f"not a tf.train.Example: byte {position - 1} is {tag}, which begins no field"
        )
    position, stop = _content(record, tag & 7, position, end)
    if stop > end:
        raise ValueError(
            f"not a whole tf.train.Example: a field at byte {position} ends at byte {stop}, its"
            f" message at byte {end}"
        )
    return tag, position, stop


def _content(record: Buffer, wire: int, position: int, end: int) -> tuple[int, int]:
    """Return start and end of the content after a tag with this wire type."""
    if wire == 2:
        length, position = _varint(record, position, end)
        return position, position + length
    if wire == 0:
        return position, _varint(record, position, end)[1]
    if wire == 3:
        return position, _end_of_group(record, position, end)
    if wire in (1, 5):
        return position, position + (8 if wire == 1 else 4)
    raise ValueError(f"not a tf.train.Example: byte {position - 1} has wire type {wire}")


def _varint(record: Buffer, position: int, end: int) -> tuple[int, int]:
    """Return the varint at `position`, and the position after it."""
    value = shift = 0
    while position < end and shift < 70:
        byte = record[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, position
        shift += 7
    raise ValueError(
        f"not a whole tf.train.Example: the number before byte {position} does not end"
    )


def _end_of_group(record: Buffer, position: int, end: int) -> int:
    """Return the position after a group.

    Groups are a deprecated form of nested messages; no known field is one, so they are skipped.
    """
    depth = 1
    while depth:
        if position >= end:
            raise ValueError("not a whole tf.train.Example: a group does not end")
        tag, after = _varint(record, position, end)
        if tag & 7 in (3, 4):
            depth += 1 if tag & 7 == 3 else -1
            position = after
        else:
            _, _, position = next_field(record, position, end)
    return position


def _values(record: Buffer, position: int, end: int) -> Value:
    """Return the values of the Feature between `position` and `end`."""
    kind = 0
    lists: list[tuple[int, int]] = []
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag in (0x0A, 0x12, 0x1A):
            if tag >> 3 != kind:
                kind, lists = tag >> 3, []
            lists.append((start, position))
    if kind == _BYTES:
        return [value for span in lists for value in _bytes_list(record, *span)]
    if kind == _FLOATS:
        return np.concatenate([_float_list(record, *span) for span in lists])
    if kind == _INTS:
        return np.array([value for span in lists for value in _int_list(record, *span)], np.int64)
    return []


def _bytes_list(record: Buffer, position: int, end: int) -> list[Buffer]:
    values = []
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag == 0x0A:
            values.append(record[start:position])
    return values


def _float_list(record: Buffer, position: int, end: int) -> NDArray[np.float32]:
    values = [np.empty(0, np.float32)]
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag in (0x0A, 0x0D):
            if (position - start) % 4:
                raise ValueError(
                    f"not a tf.train.Example: {position - start} bytes at byte {start} are not"
                    " float32 values"
                )
            values.append(np.frombuffer(bytes(record[start:position]), "<f4"))
    return np.concatenate(values).astype(np.float32, copy=False)


def _int_list(record: Buffer, position: int, end: int) -> Iterable[int]:
    values: list[int] = []
    while position < end:
        tag, start, position = next_field(record, position, end)
        if tag == 0x0A:
            values.extend(_packed_ints(record, start, position))
        elif tag == 0x08:
            values.append(_signed(_varint(record, start, position)[0]))
    return values


def _packed_ints(record: Buffer, position: int, end: int) -> Iterable[int]:
    if end - position >= _MANY:
        return list(_many_packed_ints(np.frombuffer(record, np.uint8, end - position, position)))
    values = []
    while position < end:
        value, position = _varint(record, position, end)
        values.append(_signed(value))
    return values


def _many_packed_ints(content: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the integers of a packed list, all decoded together, byte position by position."""
    last = np.flatnonzero(content < 0x80)
    if not last.size or last[-1] != len(content) - 1:
        raise ValueError("not a whole tf.train.Example: the last number of a list does not end")
    first = np.concatenate(([0], last[:-1] + 1))
    longest = int((last - first).max()) + 1
    if longest > 10:
        raise ValueError(
            f"not a tf.train.Example: a number of a list has {longest} bytes, more than 10"
        )
    values = np.zeros(len(last), np.uint64)
    for byte in range(longest):
        reaches = first + byte <= last
        bits = (content[(first + byte)[reaches]] & 0x7F).astype(np.uint64)
        values[reaches] |= bits << np.uint64(7 * byte)
    return values.view(np.int64)


def _signed(value: int) -> int:
    """Return the int64 with the same bits as the uint64 `value`."""
    return value - (1 << 64) if value >> 63 else value


def _feature(name: str, value: Any) -> bytes:
    """Return a Feature message, whose kind follows from the Python or numpy type of the values."""
    values = _as_list(value)
    if not values:
        return b""
    if all(isinstance(one, bytes | bytearray | memoryview | str) for one in values):
        contents = (one.encode() if isinstance(one, str) else one for one in values)
        return _field(_BYTES, b"".join(_field(1, content) for content in contents))
    if all(isinstance(one, int | np.integer | np.bool_) for one in values):
        return _field(_INTS, _field(1, b"".join(_int64(name, int(one)) for one in values)))
    if all(isinstance(one, int | float | np.integer | np.floating) for one in values):
        # A value that is too large for float32 becomes infinite, as in TensorFlow.
        with np.errstate(over="ignore"):
            return _field(_FLOATS, _field(1, np.array(values, "<f4").tobytes()))
    kinds = ", ".join(sorted({type(one).__name__ for one in values}))
    raise ValueError(
        f"feature {name!r}: expected bytes, text or numbers of one kind, found {kinds}"
    )


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.ravel().tolist())
    return list(value) if isinstance(value, list | tuple) else [value]


def _int64(name: str, value: int) -> bytes:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"feature {name!r}: {value} does not fit into 64 bits")
    return varint(value & _UINT64)


def _field(number: int, content: Any) -> bytes:
    return b"".join((bytes([number << 3 | 2]), varint(len(content)), content))


def varint(value: int) -> bytes:
    """Return `value`, which is not negative, as a varint."""
    if value < 0x80:
        return bytes([value])
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
