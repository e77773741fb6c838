"""Find all records of a TFRecord file; in a damaged file, all that are intact.

The scan reads only headers: 12 bytes per record, whose length must match its CRC. Consecutive
records of one length, such as decoded images of one size, have equal headers; many are compared
together.

**Damage.** Where there is no sound header, the next record must be searched for: the next offset at
which a length matches its CRC *and* the data after it matches its own. Everything before that is
one lost range, and becomes one bad sample.

```
| record | record | ###### | record | record |   A damaged length: the lost range begins after the
                                                 last sound record.
| record | rec##  ord | record | record |        Bytes were lost or inserted: the record before does
                                                 not match its CRC either, so the lost range and
                                                 the search begin with it.
| record | record | rec                          A file that was cut: the rest is one lost range
                                                 without a record.
```

So one flipped bit costs one sample, and a cut file delivers all of its complete records. The scan
does not look for damage inside the data of a record: its number and offset are right, and reading
the sample detects it. Sample numbers depend on the content of the file only, so all workers number
alike.

A search tries at most `_TRIES` offsets with a sound header and wrong data, or reads `_TIMES` the
size of the file, so that a file cannot be constructed to be slow. It skips runs of zeros: the CRC
of a length is never zero, so no header is all zeros.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.checksum import crc32c, mask, masked
from allstep.data.sources.tfrecord.framing import HEADER, OVERHEAD, data_at, length_at
from allstep.data.sources.zeros import end_of_zeros

# Offsets that a search examines together: at first, and at most.
_FIRST_WINDOW, _WINDOW = 1 << 10, 1 << 17
_TRIES = 1000
_TIMES = 16
# Records whose headers are compared together: at first, and at most. The number grows only while
# all are equal, since each comparison touches a page.
_SHORT_RUN, _LONG_RUN = 8, 4096
# An index stores lengths as uint32.
_MAX_LENGTH = 0xFFFFFFFF
# Bytes between two calls of a progress function.
_EVERY = 1 << 26


@dataclass
class Walk:
    """The result of a scan: `offsets` and `lengths` of all samples, lost ranges included.

    `lost` has the reason for each lost range, by its row.
    """

    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    lost: dict[int, str] = field(default_factory=dict)

    def add_lost(self, offset: int, end: int, reason: str) -> None:
        """Add the lost range from `offset` to `end` as one sample."""
        self.lost[len(self.offsets)] = reason
        self.offsets.append(offset)
        self.lengths.append(min(end - offset, _MAX_LENGTH))

    def drop_last(self) -> int:
        """Remove the last record; return its offset."""
        self.lengths.pop()
        return self.offsets.pop()


def walk(view: memoryview, progress: Callable[[int], None] | None = None) -> Walk:
    """Return all samples of the file whose bytes are `view`.

    `progress` is called now and then with the number of bytes scanned so far.
    """
    found = Walk()
    offset = 0
    while True:
        offset = _walk_sound(view, offset, found, progress)
        if offset == len(view):
            return found
        offset = _pass_damage(view, offset, found)


def _walk_sound(
    view: memoryview, offset: int, found: Walk, progress: Callable[[int], None] | None
) -> int:
    """Add the records from `offset` on to `found`, up to the first damage or the end of the file.

    Return the offset of that.
    """
    lengths, size = _Lengths(), len(view)
    before, reach, report_at = b"", _SHORT_RUN, offset
    while offset + OVERHEAD <= size:
        head = bytes(view[offset : offset + HEADER])
        step = OVERHEAD + lengths[head]
        if step < OVERHEAD or offset + step > size:
            break
        run = _run(view, offset, head, step, reach) if head == before else 1
        reach = min(2 * reach, _LONG_RUN) if run == reach else _SHORT_RUN
        if run == 1:
            found.offsets.append(offset)
            found.lengths.append(step - OVERHEAD)
        else:
            found.offsets.extend(range(offset, offset + run * step, step))
            found.lengths.extend((step - OVERHEAD,) * run)
        offset += run * step
        before = head
        if progress and offset >= report_at:
            progress(offset)
            report_at = offset + _EVERY
    return offset


class _Lengths(dict[bytes, int]):
    """A cache of the lengths in headers; -1 for a header that is damaged or too long for a sample.

    Lengths repeat, so most headers are in the cache.
    """

    def __missing__(self, head: bytes) -> int:
        length = int.from_bytes(head[:8], "little")
        if masked(head[:8]) != int.from_bytes(head[8:], "little") or length > _MAX_LENGTH:
            return -1
        if len(self) > 1 << 16:
            self.clear()
        self[head] = length
        return length


def _run(view: memoryview, offset: int, head: bytes, step: int, reach: int) -> int:
    """Return how many of the next `reach` records from `offset` on are complete and have `head`.

    The first one does; the count ends at the first other header.
    """
    count = min(reach, (len(view) - offset) // step)
    rows = np.frombuffer(view, np.uint8, count * step, offset).reshape(count, step)[:, :HEADER]
    differ = (rows != np.frombuffer(head, np.uint8)).any(axis=1)
    return int(differ.argmax()) if differ.any() else count


def _pass_damage(view: memoryview, offset: int, found: Walk) -> int:
    """Add the lost range at `offset`; return the offset of the next sound record, or the end."""
    reason = _problem(view, offset)
    last = len(found.offsets) - 1
    is_record = last >= 0 and last not in found.lost
    if is_record and not _is_sound(view, found.offsets[last], found.lengths[last]):
        offset = found.drop_last()
        reason = f"bytes were lost or inserted after it, and {reason}"
    after = _search(view, offset + 1)
    found.add_lost(offset, after, f"{after - offset} bytes without a sound record: {reason}")
    return after


def _problem(view: memoryview, offset: int) -> str:
    """Return why there is no sound record at `offset`."""
    try:
        length = length_at(view, offset)
    except ValueError as error:
        return str(error)
    return f"its {length} bytes are more than the {_MAX_LENGTH} that a sample may have"


def _is_sound(view: memoryview, offset: int, length: int) -> bool:
    """Return whether the data of the record at `offset` matches its checksum."""
    try:
        data_at(view, offset, length)
    except ValueError:
        return False
    return True


def _search(view: memoryview, offset: int) -> int:
    """Return the first offset from `offset` on of a complete, sound record, or the file's end."""
    tries, spent, start, end = 0, 0, offset, len(view) - OVERHEAD + 1
    # Small at first: the next record is usually near, and a file may have thousands of damaged
    # places.
    window = _FIRST_WINDOW
    while start < end:
        # The last byte of a header may be its only one that is not zero.
        start = max(start, min(end_of_zeros(view, start), end) - HEADER + 1)
        count = min(window, end - start)
        window = min(4 * window, _WINDOW)
        for place, length in _candidates(view, start, count):
            if _is_sound(view, place, length):
                return place
            tries, spent = tries + 1, spent + length
            if tries == _TRIES or spent > _TIMES * len(view):
                return len(view)
        start += count
    return len(view)


def _candidates(view: memoryview, start: int, count: int) -> list[tuple[int, int]]:
    """Return (offset, length) of possible records among the `count` offsets from `start` on.

    At these, the length fits into the file and matches its CRC.
    """
    window = np.frombuffer(view, np.uint8, count + HEADER - 1, start)
    nbytes = min(8, ((len(view) - start).bit_length() + 7) // 8)
    possible = np.ones(count, bool)
    # The upper bytes of a length that fits into the file are zero.
    for byte in range(nbytes, 8):
        possible &= window[byte : byte + count] == 0
    places = np.flatnonzero(possible)
    if not len(places):
        return []
    # The two bytes from each offset on as one number, for half as many lookups.
    pairs = window[:-1] | window[1:].astype(np.uint16) << np.uint16(8)
    found = pairs[places + 8] | pairs[places + 10].astype(np.uint32) << np.uint32(16)
    places = places[_crc_of_lengths(pairs, places, nbytes) == found]
    heads = window[places[:, None] + np.arange(8)]
    lengths = heads.view("<u8")[:, 0]
    fits = lengths <= np.uint64(len(view) - OVERHEAD) - (places + start).astype(np.uint64)
    fits &= lengths <= np.uint64(_MAX_LENGTH)
    return [(int(p) + start, int(n)) for p, n in zip(places[fits], lengths[fits], strict=True)]


@cache
def _tables() -> NDArray[np.uint32]:
    """Return, for each of the four pairs of 8 bytes, the CRC32C of each value of the pair alone.

    CRC32C is linear: that of 8 bytes is the exclusive or of the four table entries and of the
    CRC32C of 8 zeros.
    """
    zeros = crc32c(bytes(8))
    alone = np.array(
        [
            [crc32c(bytes(i) + bytes([v]) + bytes(7 - i)) ^ zeros for v in range(256)]
            for i in range(8)
        ],
        np.uint32,
    )
    return np.stack([(alone[i + 1][:, None] ^ alone[i]).ravel() for i in range(0, 8, 2)])


def _crc_of_lengths(
    pairs: NDArray[np.uint16], places: NDArray[np.int64], nbytes: int
) -> NDArray[np.uint32]:
    """Return the masked CRC32C of the 8 bytes at each place, all zero after the first `nbytes`."""
    crc = np.full(len(places), crc32c(bytes(8)), np.uint32)
    for byte in range(0, nbytes, 2):
        crc ^= _tables()[byte // 2][pairs[places + byte]]
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return rotated + np.uint32(mask(0))
