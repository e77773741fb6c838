"""Finds all records of a TFRecord file, and as many as there are in a damaged one.

The walk goes from header to header and reads nothing else: 12 bytes a record, whose length must
agree with its CRC. Runs of records of one length, as decoded images of one size are, have equal
headers; they are compared many at once.

**Damage.** Where no sound header stands, the rest must be searched for: the next place where a
length agrees with its CRC *and* the data behind it with its own. Everything between is one lost
stretch, and becomes one bad sample.

```
| record | record | ###### | record | record |        a damaged length: the search begins behind the last sound record
| record | rec##  ord | record | record |             bytes were lost or put in: the record before does not agree with its CRC either,
                                                      so the stretch, and the search, begin with it
| record | record | rec                               a file that was cut: the rest is one lost stretch, with no record in it
```

So one flipped bit costs one sample, and a cut file gives all of its whole records. Damage inside a
record's data is not looked for here: its number and place are right, and whoever reads it finds
out. Numbers come from the file's content alone: every worker counts alike.

A search tries at most `_TRIES` places whose header is sound and whose data is not, or `_TIMES` the
bytes of the file, so that a file made to be slow cannot be. It passes over runs of zeros: the CRC
of a length is never zero, so no header is.
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

_FIRST_WINDOW, _WINDOW = 1 << 10, 1 << 17  # places that are looked at at once
_TRIES = 1000
_TIMES = 16  # the file's size, read in such tries
_SHORT_RUN, _LONG_RUN = (
    8,
    4096,
)  # records compared at once; more only while that goes well: each one touches a page
_LONGEST = 0xFFFFFFFF  # an index holds lengths as uint32
_EVERY = 1 << 26  # bytes between two words of progress


@dataclass
class Walk:
    """What was found:

    `offsets` and `lengths` of all samples, lost stretches among them, and the reason for each lost
    one by number.
    """

    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    lengths: "array[int]" = field(default_factory=lambda: array("I"))
    lost: dict[int, str] = field(default_factory=dict)

    def add_lost(self, offset: int, end: int, reason: str) -> None:
        self.lost[len(self.offsets)] = reason
        self.offsets.append(offset)
        self.lengths.append(min(end - offset, _LONGEST))

    def drop_last(self) -> int:
        self.lengths.pop()
        return self.offsets.pop()


def walk(view: memoryview, progress: Callable[[int], None] | None = None) -> Walk:
    """All samples of the file whose bytes are `view`."""
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
    """Adds the records from `offset` on up to the file's end or the first damage; gives back where
    that is."""
    lengths, size = _Lengths(), len(view)
    before, reach, word = b"", _SHORT_RUN, offset
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
        if progress and offset >= word:
            progress(offset)
            word = offset + _EVERY
    return offset


class _Lengths(dict[bytes, int]):
    """The length in a header, or -1 if it is damaged or no sample can be that long.

    Lengths repeat, so most are known already.
    """

    def __missing__(self, head: bytes) -> int:
        length = int.from_bytes(head[:8], "little")
        if masked(head[:8]) != int.from_bytes(head[8:], "little") or length > _LONGEST:
            return -1
        if len(self) > 1 << 16:
            self.clear()
        self[head] = length
        return length


def _run(view: memoryview, offset: int, head: bytes, step: int, reach: int) -> int:
    """How many of the next `reach` records from `offset` on have just this header and are whole;
    the first one does."""
    count = min(reach, (len(view) - offset) // step)
    rows = np.frombuffer(view, np.uint8, count * step, offset).reshape(count, step)[:, :HEADER]
    differ = (rows != np.frombuffer(head, np.uint8)).any(axis=1)
    return int(differ.argmax()) if differ.any() else count


def _pass_damage(view: memoryview, offset: int, found: Walk) -> int:
    """Adds the lost stretch at `offset` and gives back where the next sound record is, or the
    file's end."""
    reason = _what_is_wrong(view, offset)
    last = len(found.offsets) - 1
    if (
        last >= 0
        and last not in found.lost
        and not _agrees(view, found.offsets[last], found.lengths[last])
    ):
        offset = found.drop_last()
        reason = f"bytes were lost or put in behind it, and {reason}"
    after = _search(view, offset + 1)
    found.add_lost(offset, after, f"{after - offset} bytes without a sound record: {reason}")
    return after


def _what_is_wrong(view: memoryview, offset: int) -> str:
    try:
        length = length_at(view, offset)
    except ValueError as error:
        return str(error)
    return f"its {length} bytes are more than the {_LONGEST} that a sample may have"


def _agrees(view: memoryview, offset: int, length: int) -> bool:
    try:
        data_at(view, offset, length)
    except ValueError:
        return False
    return True


def _search(view: memoryview, offset: int) -> int:
    """The first place from `offset` on where a whole, sound record stands; the file's end if there
    is none."""
    tries, spent, start, end = 0, 0, offset, len(view) - OVERHEAD + 1
    # Small at first: mostly the next record is near, and a file may be damaged at thousands of
    # places.
    window = _FIRST_WINDOW
    while start < end:
        # A header may begin with zeros, but at most with all of its bytes but one.
        start = max(start, min(end_of_zeros(view, start), end) - HEADER + 1)
        count = min(window, end - start)
        window = min(4 * window, _WINDOW)
        for place, length in _candidates(view, start, count):
            if _agrees(view, place, length):
                return place
            tries, spent = tries + 1, spent + length
            if tries == _TRIES or spent > _TIMES * len(view):
                return len(view)
        start += count
    return len(view)


def _candidates(view: memoryview, start: int, count: int) -> list[tuple[int, int]]:
    """Places among the `count` from `start` on that could begin a record: the length fits into the
    file and agrees with its CRC."""
    window = np.frombuffer(view, np.uint8, count + HEADER - 1, start)
    nbytes = min(8, ((len(view) - start).bit_length() + 7) // 8)
    possible = np.ones(count, bool)
    for byte in range(nbytes, 8):  # a length that fits into the file has zeros above
        possible &= window[byte : byte + count] == 0
    places = np.flatnonzero(possible)
    if not len(places):
        return []
    # Of each place the two bytes from there on, as one number: half as many lookups.
    pairs = window[:-1] | window[1:].astype(np.uint16) << np.uint16(8)
    found = pairs[places + 8] | pairs[places + 10].astype(np.uint32) << np.uint32(16)
    places = places[_crc_of_lengths(pairs, places, nbytes) == found]
    heads = window[places[:, None] + np.arange(8)]
    lengths = heads.view("<u8")[:, 0]
    fits = lengths <= np.uint64(len(view) - OVERHEAD) - (places + start).astype(np.uint64)
    fits &= lengths <= np.uint64(_LONGEST)
    return [(int(p) + start, int(n)) for p, n in zip(places[fits], lengths[fits], strict=True)]


@cache
def _tables() -> NDArray[np.uint32]:
    """Return what each two of 8 bytes give alone.

    CRC32C is linear: of 8 bytes it is the exclusive or of these, and of what 8 zeros give.
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
    """Masked CRC32C of the 8 bytes at each place; only the first `nbytes` are not zero."""
    crc = np.full(len(places), crc32c(bytes(8)), np.uint32)
    for byte in range(0, nbytes, 2):
        crc ^= _tables()[byte // 2][pairs[places + byte]]
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return rotated + np.uint32(mask(0))
