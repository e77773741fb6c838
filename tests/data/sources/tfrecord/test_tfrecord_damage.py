"""Damaged TFRecord shards. The reference is the list of records that was written: whatever is
delivered as good must be one of them, in order, and every record whose bytes are still there whole
must be delivered."""

import os
import random
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data.sources.source import BadSample, Place
from allstep.data.sources.tfrecord.framing import frame
from allstep.data.sources.tfrecord.scan import walk
from allstep.data.sources.tfrecord.source import TFRecordSource
from allstep.errors import DataError
from support.tfrecord_files import read_records

SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
SHARDS = 1000 if SOAK else 100
OFTEN = settings() if SOAK else settings(max_examples=60)
Damage = Callable[[random.Random, bytearray], None]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def flip(choose: random.Random, content: bytearray) -> None:
    for _ in range(choose.choice((1, 1, 5, 50))):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)


def cut(choose: random.Random, content: bytearray) -> None:
    del content[choose.randrange(len(content)) :]


def remove(choose: random.Random, content: bytearray) -> None:
    start = choose.randrange(len(content))
    del content[start : start + choose.choice((1, 7, 100, 3000))]


def insert(choose: random.Random, content: bytearray) -> None:
    start = choose.randrange(len(content))
    content[start:start] = choose.randbytes(choose.choice((1, 8, 12, 500)))


def zero(choose: random.Random, content: bytearray) -> None:
    start = choose.randrange(len(content))
    end = min(len(content), start + choose.choice((4, 12, 600, 5000)))
    content[start:end] = bytes(end - start)


def repeat_header(choose: random.Random, content: bytearray) -> None:
    """A sound header where none belongs."""
    start = choose.randrange(len(content))
    content[start : start + 12] = frame(bytes(choose.choice((0, 10, 10**4))))[:12]


DAMAGES: tuple[Damage, ...] = (flip, cut, remove, insert, zero, repeat_header)


def shard_of(choose: random.Random) -> list[bytes]:
    """Records that all differ, of many lengths or of two."""
    lengths = choose.choice(((20,), (300, 301), (8, 40, 900, 2500), (8, 70_000)))
    return [
        row.to_bytes(8, "big") + choose.randbytes(choose.choice(lengths))
        for row in range(choose.randrange(1, 60))
    ]


def whole_ones(content: bytes, records: list[bytes]) -> list[bytes]:
    """The records that are still in `content` byte for byte; what an ideal reader would find."""
    found, start = [], 0
    for record in records:
        framed = frame(record)
        place = content.find(framed, start)
        if place >= 0:
            found.append(record)
            start = place + len(framed)
    return found


@pytest.mark.soak(1)  # its count is in the test
@pytest.mark.timeout(600)
def test_damaged_shards_give_all_whole_records_and_nothing_else(tmp_path: Path) -> None:
    bad_ones = 0
    for number in range(SHARDS):
        choose = random.Random(number)
        records = shard_of(choose)
        content = bytearray(b"".join(map(frame, records)))
        for _ in range(choose.choice((1, 1, 2, 4))):
            if content:
                choose.choice(DAMAGES)(choose, content)
        path = tmp_path / f"{number}.tfrecord"
        path.write_bytes(content)
        source = TFRecordSource(path, features={})
        good: list[bytes] = []
        places: list[Place] = []
        for row in range(len(source)):
            try:
                good.append(bytes(source.read(row).data))
            except BadSample as bad:
                places.append(bad.place)
        expected = whole_ones(bytes(content), records)
        # Empty records do not count: `repeat_header` may add them.
        assert [record for record in good if record] == expected, number
        assert all(
            0 <= place.offset < len(content) and place.file == str(path) for place in places
        ), number
        bad_ones += len(places)
        path.unlink()
    assert bad_ones > SHARDS / 2


def test_one_flipped_bit_costs_one_record_wherever_it_is(tmp_path: Path) -> None:
    records = [b"%d" % row * 4 for row in range(5)]
    content = b"".join(map(frame, records))
    for bit in range(0, 8 * len(content), 5):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path = tmp_path / f"{bit}.tfrecord"
        path.write_bytes(damaged)
        source = TFRecordSource(path, features={})
        found = [_or_none(source, row) for row in range(len(source))]
        hit = next(
            row
            for row, _ in enumerate(records)
            if bit // 8 < sum(len(frame(one)) for one in records[: row + 1])
        )
        assert found == [None if row == hit else record for row, record in enumerate(records)], bit


def _or_none(source: TFRecordSource, row: int) -> bytes | None:
    try:
        return bytes(source.read(row).data)
    except BadSample:
        return None


def test_a_cut_end_is_one_bad_sample_with_that_reason(tmp_path: Path) -> None:
    records = [bytes([row]) * 100 for row in range(4)]
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(map(frame, records))[:-30])
    source = TFRecordSource(path, features={})
    assert [bytes(source.read(row).data) for row in range(3)] == records[:3] and len(source) == 4
    with pytest.raises(
        BadSample,
        match=(
            r"at byte 348\): 86 bytes without a sound record: its 100 bytes of data are cut off: .*"
            r" 74 of them"
        ),
    ):
        source.read(3)


def test_a_file_that_is_something_else_is_one_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"hello, this is not a record file at all" * 1000)
    source = TFRecordSource(path, features={})
    assert len(source) == 1 and list(source.shards[0].lost) == [0]
    with pytest.raises(DataError, match="no good record among the first 1"):
        TFRecordSource(path)


def test_a_search_through_zeros_and_false_headers_ends(tmp_path: Path) -> None:
    """2 MB of zeros, and headers that promise data which does not come: quick, and the record
    behind the zeros is found."""
    zeros = walk(memoryview(b"x" + bytes(2_000_000) + frame(b"found")))
    assert list(zeros.lengths)[1:] == [5] and list(zeros.lost) == [0]
    headers = walk(memoryview(b"x" + frame(bytes(100))[:12] * 20_000 + frame(b"lost")))
    assert len(headers.offsets) < 20_000


@OFTEN
@given(st.lists(st.binary(max_size=60), max_size=20))
def test_framing_is_undone_by_reading_and_walking(records: list[bytes]) -> None:
    framed = list(map(frame, records))
    content, offsets = b"".join(framed), [0, *accumulate(map(len, framed))][: len(framed)]
    assert [bytes(data) for data in read_records(content)] == records
    found = walk(memoryview(content))
    assert (
        list(found.offsets) == offsets
        and list(found.lengths) == [len(record) for record in records]
        and not found.lost
    )


@OFTEN
@given(st.binary(max_size=300))
def test_any_bytes_can_be_walked_through(content: bytes) -> None:
    found = walk(memoryview(content))
    ends = [
        offset + min(length, 1) for offset, length in zip(found.offsets, found.lengths, strict=True)
    ]
    assert all(end <= len(content) for end in ends) and bool(found.offsets) == bool(content)
    assert np.all(np.diff(np.array(found.offsets, np.int64)) > 0)


def test_reading_in_a_row_stops_at_damage_and_names_it() -> None:
    content = frame(b"one") + frame(b"two")
    with pytest.raises(ValueError, match="its CRC32C"):
        list(read_records(content[:-1] + bytes([content[-1] ^ 1])))
    with pytest.raises(ValueError, match="length field is damaged"):
        list(read_records(b"\xff" + content))
    with pytest.raises(ValueError, match="the file ends 4 bytes after it"):
        list(read_records(content[:23]))


def test_zeros_are_passed_over_quickly(tmp_path: Path) -> None:
    """As a file system leaves them after a power cut.

    They took 70 times as long as random bytes: minutes for a gigabyte.
    """

    def seconds(content: bytes) -> float:
        view = memoryview(b"x" + content + frame(b"after"))
        start = time.process_time()
        assert list(walk(view).lengths)[1:] == [5]
        return time.process_time() - start

    seconds(bytes(1000))
    zeros, random_bytes = seconds(bytes(1 << 25)), seconds(random.Random(0).randbytes(1 << 25))
    assert zeros < 5 * random_bytes, (zeros, random_bytes)


@pytest.mark.parametrize("shift", range(12))
def test_a_record_behind_zeros_is_found_wherever_they_end(shift: int) -> None:
    """Lengths begin with zero bytes themselves where they are multiples of 256."""
    for length in (0, 1, 256, 65_536):
        content = b"x" + bytes((1 << 17) + shift) + frame(bytes(length)) + frame(b"end")
        found = walk(memoryview(content))
        assert list(found.lengths)[1:] == [length, 3], (length, shift)
