"""Indexes: stored, checked, rebuilt. The reference is the scan itself."""

import errno
import fcntl
import gzip
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allstep.data.sources import index as index_module
from allstep.data.sources.index import (
    Index,
    find_index,
    index_places,
    indexed,
    read_index,
    write_index,
)
from allstep.data.sources.tfrecord.framing import frame
from allstep.data.sources.tfrecord.source import KIND, TFRecordSource
from allstep.data.sources.unpack import unpacked
from allstep.errors import DataError
from support.ranks import wait_until

RECORDS = [b"%d" % row * 10 for row in range(100)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "set" / "x.tfrecord"
    path.parent.mkdir()
    path.write_bytes(b"".join(map(frame, RECORDS)))
    return path


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each walk through a shard."""
    from allstep.data.sources.tfrecord import source as tfrecord

    walk, done = tfrecord.walk, list[int]()
    monkeypatch.setattr(tfrecord, "walk", lambda *given: (done.append(1), walk(*given))[1])
    return done


def contents(path: Path) -> list[bytes]:
    source = TFRecordSource(path, features={})
    return [bytes(source.read(number).data) for number in range(len(source))]


def next_to(shard: Path) -> Path:
    return shard.parent / f".{shard.name}.allstep-index"


def test_a_shard_is_walked_once(shard: Path, walks: list[int]) -> None:
    assert contents(shard) == contents(shard) == RECORDS
    assert walks == [1] and next_to(shard).exists()
    assert sorted(path.name for path in shard.parent.iterdir()) == [next_to(shard).name, shard.name]


def test_a_changed_shard_is_walked_again(shard: Path, walks: list[int]) -> None:
    contents(shard)
    shard.write_bytes(b"".join(map(frame, RECORDS[:50])))
    assert contents(shard) == RECORDS[:50]
    os.utime(shard, ns=(1, 1))
    assert contents(shard) == RECORDS[:50]
    assert len(walks) == 3


@pytest.mark.parametrize(
    "what",
    ["empty", "half", "flipped head", "flipped middle", "flipped end", "foreign", "a folder"],
)
def test_a_damaged_or_foreign_index_is_built_again(
    shard: Path, walks: list[int], what: str
) -> None:
    contents(shard)
    content = bytearray(next_to(shard).read_bytes())
    if what == "a folder":
        next_to(shard).unlink()
        next_to(shard).mkdir()
    elif what in ("empty", "half", "foreign"):
        next_to(shard).write_bytes(
            {"empty": b"", "half": content[: len(content) // 2], "foreign": b"PK\3\4" * 100}[what]
        )
    else:
        place = {
            "flipped head": 20,
            "flipped middle": len(content) // 2,
            "flipped end": len(content) - 1,
        }[what]
        content[place] ^= 4
        next_to(shard).write_bytes(content)
    assert contents(shard) == RECORDS and len(walks) == 2
    assert contents(shard) == RECORDS and len(walks) == 2


def test_an_index_of_another_kind_or_format_does_not_count(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents(shard)
    stamp = read_index(next_to(shard), KIND).stamp  # type: ignore[union-attr]
    assert read_index(next_to(shard), KIND, stamp) and not read_index(next_to(shard), "tar", stamp)
    assert not find_index((next_to(shard),), KIND, stamp, ("crc",))
    monkeypatch.setattr(index_module, "FORMAT", 99)
    assert not read_index(next_to(shard), KIND, stamp)


def test_where_the_folder_cannot_be_written_the_cache_is_used(
    shard: Path, walks: list[int], tmp_path: Path
) -> None:
    next_to(shard).mkdir()  # also root cannot put a file there
    assert contents(shard) == contents(shard) == RECORDS and walks == [1]
    assert [path.suffix for path in (tmp_path / "cache" / "index").iterdir()] == [".allstep-index"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_where_nothing_can_be_written_the_index_stays_in_memory(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(index_module, "_write_body", refuse)
    assert contents(shard) == RECORDS
    assert [path.name for path in shard.parent.iterdir()] == [shard.name] and not list(
        (tmp_path / "cache" / "index").iterdir()
    )


def test_columns_of_every_kind_come_back(tmp_path: Path) -> None:
    columns = {
        "offset": np.arange(1000, dtype=np.uint64),
        "none": np.empty(0, np.int32),
        "odd": np.arange(7, dtype=np.uint8),
        "every other": np.arange(20, dtype=np.int16)[::2],
    }
    made = Index(columns, {"names": ["ä", "b"], "lost": [[3, "why"]]}, {"size": 1})
    assert write_index(tmp_path / "new" / "i", "kind", made)
    found = read_index(tmp_path / "new" / "i", "kind", {"size": 1})
    assert found is not None and found.extra == made.extra and found.stamp == made.stamp
    for name, column in columns.items():
        assert np.array_equal(found[name], column) and found[name].dtype == column.dtype
        assert found[name].ctypes.data % column.itemsize == 0


def test_a_part_left_by_a_kill_makes_way(tmp_path: Path) -> None:
    """One that is locked has an owner; without a lock, its owner is gone."""
    part = tmp_path / ".i.part"
    part.write_bytes(b"old")
    with part.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        os.utime(part, (1, 1))
        assert write_index(tmp_path / "i", "kind", Index({})) and part.exists()
    assert write_index(tmp_path / "i", "kind", Index({})) and not part.exists()


def test_without_locks_a_part_is_left_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    part = tmp_path / ".i.part"
    part.write_bytes(b"old")
    assert write_index(tmp_path / "i", "kind", Index({})) and part.exists()
    os.utime(part, (1, 1))
    assert write_index(tmp_path / "i", "kind", Index({})) and not part.exists()


UNPACK = "import sys; from allstep.data.sources.unpack import unpacked; unpacked(sys.argv[1])"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_unpacking_leaves_its_part_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    packed = tmp_path / "x.tar.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        for _ in range(400):
            file.write(bytes(1 << 20))
    process = subprocess.Popen([sys.executable, "-c", UNPACK, str(packed)])
    wait_until(lambda: any((tmp_path / "cache").rglob("*.part")))
    process.send_signal(number)
    process.wait(60)
    (left,) = (tmp_path / "cache").rglob("*.part")
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(bytes(1000))
    unpacked(str(packed))
    assert not left.exists()


def test_a_thousand_shards_need_no_descriptors(shard: Path) -> None:
    content = shard.read_bytes()
    for number in range(300):
        (shard.parent / f"y-{number:03}.tfrecord").write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 50, before[1]))
    try:
        source = TFRecordSource(f"{shard.parent}/y-*.tfrecord", features={})
        assert len(source) == 30_000
        assert all(
            bytes(source.read(number).data) == RECORDS[0] for number in range(0, 30_000, 100)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


AT_ONCE = """
import sys
from allstep.data.sources.tfrecord.source import TFRecordSource
print("ready", flush=True)
sys.stdin.readline()
source = TFRecordSource(sys.argv[1], features={})
print(sum(bytes(source.read(row).data) == b"%d" % row * 10 for row in range(len(source))))
"""


@pytest.mark.usefixtures("processes")
def test_processes_that_index_at_once_all_get_it_right(shard: Path) -> None:
    command = [sys.executable, "-c", AT_ONCE, str(shard)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [worker.stdout.readline() for worker in workers if worker.stdout] == ["ready\n"] * 3
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    assert [worker.communicate()[0] for worker in workers] == ["100\n"] * 3
    assert sorted(path.name for path in shard.parent.iterdir()) == [next_to(shard).name, shard.name]


def test_who_waits_takes_what_the_other_made(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn comes when the other is done: then there is nothing left to do."""
    from contextlib import contextmanager

    made = Index({"a": np.arange(3)}, stamp={"size": 3})

    @contextmanager
    def other_was_quicker(where: Path) -> Iterator[None]:
        write_index(index_places(where)[0], "kind", made)
        yield

    monkeypatch.setattr(index_module, "in_turn", other_was_quicker)
    found = indexed(shard, "kind", lambda: {"size": 3}, lambda: pytest.fail("walked"))
    assert found["a"].tolist() == [0, 1, 2]


KILLED = """
import sys, os
from allstep.data.sources import index
from allstep.data.sources.tfrecord import source as tfrecord
write, calls = index._write_body, [0]
def stop(*given):
    if sys.argv[2] == "write":
        given[0].write(b"half of it")
        given[0].flush()
    print("now", flush=True)
    sys.stdin.read()
if sys.argv[2] == "write":
    index._write_body = stop
else:
    tfrecord.walk = stop
tfrecord.TFRecordSource(sys.argv[1], features={})
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.soak
@pytest.mark.parametrize("where", ["walk", "write"])
def test_a_kill_while_indexing_leaves_nothing_wrong(shard: Path, where: str) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(shard), where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        assert worker.stdout is not None and worker.stdout.readline() == "now\n"
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    assert not next_to(shard).exists()
    assert contents(shard) == RECORDS and next_to(shard).exists()


@pytest.mark.usefixtures("processes")
def test_ten_million_samples_open_quickly_and_in_little_memory(tmp_path: Path) -> None:
    """The shard is a hole and its index is written directly; read in a fresh process, so that its
    memory is its own."""
    n, step = 10_000_000, 16 + 84
    path = tmp_path / "x.tfrecord"
    with path.open("wb") as file:
        file.truncate(n * step)
        for row in (0, 1_234_567, n - 1):
            file.seek(row * step)
            file.write(frame(row.to_bytes(8, "big") + bytes(76)))
    columns = {
        "offset": np.arange(n, dtype=np.uint64) * step,
        "length": np.full(n, step - 16, np.uint32),
    }
    found = path.stat()
    stamp = {"size": found.st_size, "mtime_ns": found.st_mtime_ns}
    write_index(next_to(path), KIND, Index(columns, {"packed": False, "lost": []}, stamp))
    code = f"""
import resource, time, numpy
from allstep.data.sources.tfrecord.source import TFRecordSource
def memory(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = memory(), time.perf_counter()
source = TFRecordSource({str(path)!r}, features={{}})
seconds = time.perf_counter() - start
for row in (0, 1_234_567, len(source) - 1):
    assert int.from_bytes(source.read(row).data[:8], "big") == row
for row in numpy.random.default_rng(0).integers(0, len(source), 2000).tolist():
    source.place(row)
print(len(source), seconds, memory() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, seconds, megabytes = map(float, done.stdout.split())
    assert count == n and megabytes < 200, done.stdout
    assert seconds < 10, done.stdout  # 0.02 s on a machine with nothing else to do


def test_labels_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allstep.data.sources.tfrecord.example import encode

    path = tmp_path / "x.tfrecord"
    path.write_bytes(
        b"".join(frame(encode({"image": b"x", "label": row % 3})) for row in range(30))
    )
    expected = [row % 3 for row in range(30)]
    assert TFRecordSource(path).targets().tolist() == expected
    monkeypatch.setattr(
        "allstep.data.sources.tfrecord.source.Shard._label", lambda *_: pytest.fail("read again")
    )
    assert TFRecordSource(path).targets().tolist() == expected
    with pytest.raises(pytest.fail.Exception):  # other labels are not these
        TFRecordSource(path, labels_from=1).targets()
    with pytest.raises(pytest.fail.Exception):
        TFRecordSource(path, num_classes=2).targets()


def test_large_labels_and_another_number_of_classes(tmp_path: Path) -> None:
    from allstep.data.sources.tfrecord.example import encode

    path, labels = tmp_path / "x.tfrecord", [0, 1 << 32, 2, -(1 << 40)]
    path.write_bytes(b"".join(frame(encode({"image": b"x", "label": label})) for label in labels))
    for _ in range(2):
        assert TFRecordSource(path).targets().tolist() == labels
    for names, expected in (("a\nb\nc\n", [0, -1, 2, -1]), ("a\n", [0, -1, -1, -1])):
        (tmp_path / "classes.txt").write_text(names)
        assert TFRecordSource(path).targets().tolist() == expected


def test_progress_is_reported(shard: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    TFRecordSource(shard, features={}, progress=lambda *figures: reported.append(figures))
    size = shard.stat().st_size
    assert reported[-1] == (str(shard), size, size)
    reported.clear()
    TFRecordSource(shard, features={}, progress=lambda *figures: reported.append(figures))
    assert not reported


def test_an_index_that_must_be_written_and_cannot_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "write_index", lambda *_: False)
    assert indexed(tmp_path, "kind", dict, lambda: Index({})).columns == {}
    with pytest.raises(
        DataError,
        match=r"cannot be written, neither .*; set ALLSTEP_CACHE to a folder that is writable",
    ):
        indexed(tmp_path, "kind", dict, lambda: Index({}), again=True, must_write=True)


def test_a_part_of_a_second_writer_makes_way_too(tmp_path: Path) -> None:
    for name in (".i.part", ".i.00112233.part"):
        (tmp_path / name).write_bytes(b"old")
        os.utime(tmp_path / name, (1, 1))
    assert write_index(tmp_path / "i", "kind", Index({}))
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
