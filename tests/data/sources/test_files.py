"""Files with random access, lists of shards, unpacking.

References: the bytes that were written, Python's gzip and zlib.
"""

import fcntl
import gc
import gzip
import os
import random
import re
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data.sources.checksum import crc32c, mask, masked
from allstep.data.sources.files import is_remote, open_file, remote, stamp_of
from allstep.data.sources.mapping import map_file
from allstep.data.sources.shards import Numbering, expand_braces, list_shards
from allstep.data.sources.unpack import CUT, DAMAGED, all_content, packing, unpacked
from allstep.errors import DataError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def mapped_files() -> int:
    return sum("/map-me" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_local_file_is_mapped_as_long_as_anyone_looks(tmp_path: Path) -> None:
    path = tmp_path / "map-me"
    path.write_bytes(bytes(range(256)) * 1000)
    file = open_file(path)
    content = file.read(1000, 10)
    assert (
        bytes(content) == (bytes(range(256)) * 10)[1000:1010]
        and content.readonly
        and file.size == 256_000
    )
    assert (
        file.stamp == stamp_of(path)
        and bytes(file.read(255_999, 10)) == b"\xff"
        and not file.read(256_000, 1)
    )
    del file
    gc.collect()
    assert mapped_files() == 1 and content[0] == 1000 % 256
    del content
    gc.collect()
    assert mapped_files() == 0


def test_an_empty_file_and_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert len(map_file(tmp_path / "empty")[0]) == 0
    with pytest.raises(DataError, match="nowhere: No such file"):
        open_file(tmp_path / "nowhere")
    with pytest.raises(DataError, match="nowhere: No such file"):
        stamp_of(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"is not a regular file"):
        open_file(tmp_path)


def test_a_remote_file_is_read_by_ranges() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/some/file", b"0123456789")
    try:
        file = open_file("memory://some/file")
        assert (
            file.size == 10
            and bytes(file.read(3, 4)) == b"3456"
            and bytes(file.read(8, 5)) == b"89"
            and not file.read(10, 1)
        )
        assert (
            file.stamp == stamp_of("memory://some/file")
            and is_remote(file.name)
            and not is_remote("file:///x")
        )
        memory.rm("/some/file")
        with pytest.raises(DataError, match="bytes 0 to 1 cannot be read: no such file"):
            file.read(0, 1)
    finally:
        memory.store.pop("/some/file", None)
    with pytest.raises(DataError, match="memory://nowhere: no such file"):
        open_file("memory://nowhere")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("gopher://x", "of the protocol 'gopher' are not supported"),
        ("ssh://host/x.tar", "of the protocol 'ssh'"),
        ("dask://x.tfrecord", "of the protocol 'dask'"),
        ("reference://x", "of the protocol 'reference'"),
        ("local:///etc/passwd", "of the protocol 'local'"),
        ("S3://x.tar", "of the protocol 'S3'"),
        ("reference:///::file:///etc/passwd", "chained by '::' are not supported"),
        ("simplecache::memory://some/file", "chained by '::'"),
        ("memory://some/file::memory://other", "chained by '::'"),
    ],
)
def test_only_protocols_that_name_one_file_are_opened(url: str, what: str) -> None:
    for opened in (open_file, stamp_of, lambda each: list_shards(each, bool, "files"), remote):
        with pytest.raises(
            DataError, match=f"{re.escape(url)}: URLs {what}.*; allowed are file, http, https, s3"
        ):
            opened(url)


def test_a_long_url_is_cut_in_the_error() -> None:
    with pytest.raises(DataError) as caught:
        remote("x" * 5000 + "://y")
    assert len(str(caught.value)) < 800


class Hiccups:
    """A file system whose first reads of a range fail."""

    def __init__(self, system: Any, errors: list[Exception]) -> None:
        self._system, self.errors = system, errors

    def cat_file(self, *given: Any, **named: Any) -> Any:
        if self.errors:
            raise self.errors.pop()
        return self._system.cat_file(*given, **named)


def test_a_hiccup_of_the_network_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, waits = pytest.importorskip("fsspec").filesystem("memory"), list[float]()
    monkeypatch.setattr("allstep.data.sources.files.time.sleep", waits.append)
    memory.pipe("/some/file", b"0123456789")
    try:
        file: Any = open_file("memory://some/file")
        file._system = hiccups = Hiccups(memory, [TimeoutError(), ConnectionResetError()])
        assert bytes(file.read(3, 4)) == b"3456" and waits == [0.2, 1.0]
        hiccups.errors = [TimeoutError("late")] * 4
        with pytest.raises(DataError, match="bytes 0 to 1 cannot be read: TimeoutError: late"):
            file.read(0, 1)
        assert len(hiccups.errors) == 1 and len(waits) == 4
        hiccups.errors = [PermissionError("no")] * 2
        with pytest.raises(DataError, match="PermissionError"):
            file.read(0, 1)
        assert len(hiccups.errors) == 1 and len(waits) == 4
    finally:
        memory.rm("/some", recursive=True)


def test_shards_of_a_folder_pattern_braces_and_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x-10.t", "x-09.t", "x-11.t", "y.t", ".hidden.t", "notes.txt"):
        (tmp_path / name).write_bytes(b"")

    def listed(where: Any) -> list[str]:
        return [
            Path(shard).name
            for shard in list_shards(where, lambda name: name.endswith(".t"), "files")
        ]

    assert listed(tmp_path) == listed(str(tmp_path)) == ["x-09.t", "x-10.t", "x-11.t", "y.t"]
    assert (
        listed(f"{tmp_path}/x-*.t")
        == listed(f"{tmp_path}/x-{{09..11}}.t")
        == ["x-09.t", "x-10.t", "x-11.t"]
    )
    assert listed([tmp_path / "y.t", f"{tmp_path}/x-1?.t"]) == ["y.t", "x-10.t", "x-11.t"]
    monkeypatch.chdir(tmp_path)
    assert list_shards("y.t", str.isalpha, "files") == [str(tmp_path / "y.t")]
    with pytest.raises(DataError, match=r"x-12.t: no such file"):
        listed(f"{tmp_path}/x-{{11..12}}.t")
    with pytest.raises(
        DataError, match=r"has no cats; found notes.txt, x-09.t, x-10.t, x-11.t, y.t"
    ):
        list_shards(tmp_path, lambda name: False, "cats")
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe({"/shards/b.t": b"", "/shards/a.t": b"", "/shards/c": b""})
    try:
        assert listed("memory://shards") == listed("memory://shards/*.t") == ["a.t", "b.t"]
    finally:
        memory.rm("/shards", recursive=True)


def test_braces() -> None:
    assert list(expand_braces("a{08..11}b{x,y}")) == [
        f"a{n}b{x}" for n in ("08", "09", "10", "11") for x in "xy"
    ]
    assert list(expand_braces("plain")) == ["plain"]
    with pytest.raises(DataError, match=r"\{3..1\}: expected increasing numbers"):
        list(expand_braces("a{3..1}"))
    with pytest.raises(DataError, match=r"expected at most 1000000 files, found 10000000000"):
        list(expand_braces("a{0..9999999999}"))
    with pytest.raises(DataError, match=r"expected numbers of at most 18 digits"):
        list(expand_braces("a{0..%s}" % ("9" * 5000)))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 5), max_size=8))
def test_numbering_counts_through(counts: list[int]) -> None:
    numbers = Numbering(counts)
    expected = [(shard, row) for shard, count in enumerate(counts) for row in range(count)]
    assert [numbers.locate(number) for number in range(len(numbers))] == expected
    with pytest.raises(IndexError):
        numbers.locate(sum(counts))


def test_crc32c_of_anything_with_bytes() -> None:
    assert (
        crc32c(b"123456789")
        == crc32c(memoryview(b"123456789"))
        == crc32c(bytearray(b"123456789"))
        == 0xE3069283
    )
    assert crc32c(memoryview(b"")) == 0 and mask(0) == 0xA282EAD8 == masked(b"")


CONTENT = random.Random(0).randbytes(100_000) + bytes(300_000)


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(CONTENT),
        zlib.compress(CONTENT),
        gzip.compress(CONTENT[:1000]) + gzip.compress(CONTENT[1000:]),
        gzip.compress(CONTENT) + bytes(1000),
    ],
    ids=["gzip", "zlib", "two streams", "padding"],
)
def test_packed_files_are_unpacked_once(tmp_path: Path, packed: bytes) -> None:
    path, notes = tmp_path / "x.gz", list[str]()
    path.write_bytes(packed)
    assert packing(packed[:2])
    target = unpacked(str(path), notes.append)
    assert target.read_bytes() == CONTENT and tmp_path / "cache" in target.parents
    assert unpacked(str(path), notes.append) == target and len(notes) == 1
    path.write_bytes(gzip.compress(b"other"))
    assert unpacked(str(path), notes.append).read_bytes() == b"other"
    assert not list(target.parent.glob(".*.part"))


def test_what_comes_before_the_damage_is_kept_and_marked(tmp_path: Path) -> None:
    path, notes = tmp_path / "x.gz", list[str]()
    packed = gzip.compress(CONTENT)
    path.write_bytes(packed[:50_000])
    content = unpacked(str(path), notes.append).read_bytes()
    assert (
        content.endswith(CUT)
        and CONTENT.startswith(content.removesuffix(CUT))
        and len(content) > 40_000
    )
    assert "does not end within its 50000 bytes" in notes[1]
    path.write_bytes(packed[:80_000] + bytes(100) + packed[80_100:])
    content = unpacked(str(path), notes.append).read_bytes()
    assert content.endswith(DAMAGED) and "damaged near byte" in notes[3]
    # Only the checksum is wrong.
    path.write_bytes(packed[:-8] + bytes([packed[-8] ^ 1]) + packed[-7:])
    content = unpacked(str(path), notes.append).read_bytes()
    assert content.endswith(DAMAGED) and CONTENT.startswith(content.removesuffix(DAMAGED))


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "file"))
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(
        DataError, match="cannot be written: Not a directory; set ALLSTEP_CACHE to another folder"
    ):
        unpacked(str(tmp_path / "x.gz"), lambda text: None)


class Disk:
    """A disk of `total` bytes on which only what is being unpacked takes room."""

    def __init__(self, folder: Path, total: int) -> None:
        self.folder, self.total = folder, total

    def usage(self, where: Path) -> Any:
        used = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return SimpleNamespace(total=self.total, used=used, free=self.total - used)


@pytest.mark.parametrize("kind", ["gz", "tar.gz"])
def test_a_bomb_is_unpacked_only_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """100 MB of zeros in 100 KB, on a disk of 40 MB: 2 MB of it stay free, and nothing is left
    behind."""
    disk = Disk(tmp_path / "cache", 40_000_000)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    path = tmp_path / f"x.{kind}"
    path.write_bytes(gzip.compress(bytes(100_000_000)))
    with pytest.raises(DataError) as caught:
        unpacked(str(path), lambda text: None)
    text = str(caught.value)
    assert text.startswith(f"{path}: not enough disk space for its content: ") and "\n" not in text
    found = re.search(r"([\d.]+) kB unpacked to ([\d.]+) MB \(factor ([\d.]+)\) so far", text)
    assert (
        found
        and float(found[1]) < 100
        and 30 < float(found[2]) < 40
        and 800 < float(found[3]) < 1200
    ), text
    assert "of which 2 MB must stay free" in text and "ALLSTEP_CACHE" in text
    assert disk.usage(path).used == 0
    disk.total = 200_000_000
    assert unpacked(str(path), lambda text: None).stat().st_size == 100_000_000


def test_a_full_disk_is_seen_before_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "cache", 101_000)
    monkeypatch.setattr(shutil, "disk_usage", disk.usage)
    (tmp_path / "x.gz").write_bytes(gzip.compress(CONTENT))
    with pytest.raises(
        DataError, match=r"not enough disk space for its content: .*cache/unpacked has 101 kB free"
    ):
        unpacked(str(tmp_path / "x.gz"), lambda text: None)
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/some/file", CONTENT)
    try:
        content = all_content(open_file("memory://some/file"), packed=False)
        with (
            pytest.raises(
                DataError, match="memory://some/file: not enough disk space for its content"
            ),
            content,
        ):
            pass
    finally:
        memory.rm("/some", recursive=True)


@pytest.mark.parametrize("change", ["cut", "longer", "same length"])
def test_an_unpacked_file_that_was_changed_is_unpacked_again(tmp_path: Path, change: str) -> None:
    """An index made of it would lose samples, also when the cache is empty again."""
    (tmp_path / "x.gz").write_bytes(gzip.compress(CONTENT))
    notes: list[str] = []
    first = unpacked(str(tmp_path / "x.gz"), notes.append)
    assert unpacked(str(tmp_path / "x.gz"), notes.append) == first and len(notes) == 1
    changed = {"cut": CONTENT[:-100], "longer": CONTENT + b"x", "same length": b"y" * len(CONTENT)}
    first.write_bytes(changed[change])
    os.utime(first, (1, 1)) if change == "same length" else None
    assert unpacked(str(tmp_path / "x.gz"), notes.append).read_bytes() == CONTENT
    assert len(notes) == 2 and len(list(first.parent.iterdir())) == 1


def test_what_a_kill_left_in_the_cache_is_cleared_away(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "unpacked"
    folder.mkdir(parents=True)
    left, owned = folder / ".0123-x.part", folder / ".4567-y.part"
    for part in (left, owned):
        part.write_bytes(b"half")
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"x"))
    with owned.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        target = unpacked(str(tmp_path / "x.gz"), lambda text: None)
    assert sorted(path.name for path in folder.iterdir()) == sorted((target.name, owned.name))


def test_the_copy_of_a_remote_file_has_no_name_while_it_is_read(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/some/file", CONTENT)
    try:
        with all_content(open_file("memory://some/file"), packed=False) as view:
            assert view == CONTENT and not list((tmp_path / "cache" / "index").iterdir())
    finally:
        memory.rm("/some", recursive=True)
