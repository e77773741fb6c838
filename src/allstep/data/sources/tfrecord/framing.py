"""TFRecord framing: the layout of records in a file.

```
offset        8 bytes   length of the data, little-endian
offset + 8    4 bytes   masked CRC32C of those 8 bytes
offset + 12   length    the data, mostly a tf.train.Example
...           4 bytes   masked CRC32C of the data
```

`frame` builds a record, `length_at` and `data_at` read and check one. `scan` finds the offsets of
all records, also in a damaged file.
"""

import struct
from typing import Any

from allstep import faults
from allstep.data.sources.checksum import masked

HEADER, FOOTER = 12, 4
OVERHEAD = HEADER + FOOTER
HEAD = struct.Struct("<QI")
FOOT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def frame(data: Any) -> bytes:
    """Return the record with this `data`."""
    return b"".join((header(len(data)), data, FOOT.pack(masked(data))))


def header(length: int) -> bytes:
    """Return the 12 bytes before `length` bytes of data."""
    packed = _LENGTH.pack(length)
    return packed + FOOT.pack(masked(packed))


def data_at(view: memoryview, offset: int, length: int, *, check: bool = True) -> memoryview:
    """Return the data, `length` bytes, of the record at `offset`.

    Raise ValueError if it is cut off or, unless `check` is False, does not match its checksum.
    """
    start, end = offset + HEADER, offset + HEADER + length
    if len(view) < end + FOOTER:
        raise ValueError(
            f"the record of {length} bytes needs {end + FOOTER} bytes, and there are {len(view)}"
        )
    data = view[start:end]
    if faults.active is not None:
        data = memoryview(faults.active.changed(data) or data)
    if check:
        found, expected = masked(data), FOOT.unpack_from(view, end)[0]
        if found != expected:
            raise ValueError(
                f"its CRC32C is {found:#010x}, expected {expected:#010x} as in its record: the"
                " bytes are damaged"
            )
    return data


def length_at(view: memoryview, offset: int) -> int:
    """Return the length of the data of the record at `offset`.

    Raise ValueError if the length field is damaged, or the file ends before the record.
    """
    if len(view) - offset < OVERHEAD:
        raise ValueError(
            f"the file ends {len(view) - offset} bytes after it, expected {OVERHEAD} or more"
        )
    length, crc = HEAD.unpack_from(view, offset)
    if masked(bytes(view[offset : offset + 8])) != crc:
        raise ValueError("its length field is damaged")
    if offset + OVERHEAD + length > len(view):
        raise ValueError(
            f"its {length} bytes of data are cut off: the file has {len(view) - offset - HEADER} of"
            " them"
        )
    return int(length)
