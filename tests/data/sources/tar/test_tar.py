"""Tar shards.

The reference is WebDataset, writing and reading, and Python's tarfile for the formats.
"""

import gc
import io
import json
import os
import pickle
import random
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data.sources.source import BadSample, Sample
from allstep.data.sources.tar.scan import Lost, members
from allstep.data.sources.tar.source import TarSource
from allstep.errors import DataError

OFTEN = settings() if os.environ.get("ALLSTEP_SOAK") else settings(max_examples=40)
HEADER = tarfile.TarInfo("x.jpg").tobuf(tarfile.GNU_FORMAT)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def wds(peers: None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        return pytest.importorskip("webdataset")


def write_tar(
    path: Path, members: list[tuple[str, bytes]], form: int = tarfile.PAX_FORMAT, mode: Any = "w"
) -> Path:
    with tarfile.open(path, mode, format=form) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def pairs(n: int) -> list[tuple[str, bytes]]:
    return [
        pair
        for row in range(n)
        for pair in ((f"{row:04}.jpg", b"image %d" % row * row), (f"{row:04}.cls", b"%d" % row))
    ]


def read_all(source: TarSource) -> list[Sample | None]:
    """None for a bad one."""
    found: list[Sample | None] = []
    for number in range(len(source)):
        try:
            found.append(source.read(number))
        except BadSample:
            found.append(None)
    return found


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_what_webdataset_writes_is_read_as_it_reads_it(wds: Any, tmp_path: Path) -> None:
    shuffle = random.Random(0)
    with wds.ShardWriter(f"{tmp_path}/x-%05d.tar", maxcount=7, verbose=0) as sink:
        for row in range(20):
            image = shuffle.randbytes(shuffle.randrange(2000))
            meta = {"size": row, "name": "Zürich"}
            sink.write(
                {
                    "__key__": f"some/where/{row:03}",
                    "jpg": image,
                    "cls": row % 5,
                    "json": meta,
                    "seg.png": b"s%d" % row,
                }
            )
    source = TarSource(f"{tmp_path}/x-{{00000..00002}}.tar")
    reference = list(
        wds.WebDataset(
            [str(path) for path in sorted(tmp_path.glob("x-*.tar"))],
            shardshuffle=False,
            empty_check=False,
        )
    )
    assert len(source) == len(reference) == 20
    for ours, theirs in zip(read_all(source), reference, strict=True):
        assert (
            ours is not None
            and bytes(ours.data) == theirs["jpg"]
            and ours.target == int(theirs["cls"])
        )
        assert (
            ours.fields["__key__"] == theirs["__key__"]
            and ours.fields["seg.png"] == theirs["seg.png"]
        )
        assert ours.fields["json"] == json.loads(theirs["json"])
    assert source.targets().tolist() == [row % 5 for row in range(20)]
    gc.collect()  # it leaves files open


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_of_both_kinds_are_understood(tmp_path: Path, form: int) -> None:
    name = "/".join(["folder-with-a-long-name" * 2] * 5) + "/" + "x" * 120
    path = write_tar(
        tmp_path / "x.tar",
        [(f"{name}.jpg", b"1"), (f"{name}.cls", b"3"), ("short.jpg", b"2"), ("short.cls", b"4")],
        form,
    )
    first, second = read_all(TarSource(path))
    assert first and second
    assert first.fields["__key__"] == name and bytes(first.data) == b"1" and first.target == 3
    assert second.fields["__key__"] == "short" and second.target == 4


def test_a_ustar_prefix_folders_links_and_hidden_files(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        folder = tarfile.TarInfo("a" * 90)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "x"
        tar.addfile(link)
        for name in ("a" * 90 + "/" + "b" * 60 + ".jpg", "c/.hidden.jpg", "no-extension"):
            info = tarfile.TarInfo(name)
            info.size = 600
            tar.addfile(info, io.BytesIO(bytes(600)))
    with pytest.raises(DataError, match=r"no label .* which have jpg; give its extension"):
        TarSource(path)
    (only,) = read_all(TarSource(path, target=""))
    assert (
        only
        and only.target == 0
        and only.fields["__key__"] == "a" * 90 + "/" + "b" * 60
        and len(only.data) == 600
    )


def test_targets_come_from_what_holds_a_number(tmp_path: Path) -> None:
    text = TarSource(write_tar(tmp_path / "a.tar", [("1.png", b"p"), ("1.txt", b" 7\n")]))
    assert text.read(0).target == 7
    meta = TarSource(
        write_tar(
            tmp_path / "b.tar", [("1.png", b"p"), ("1.txt", b"a cat"), ("1.json", b'{"label": 3}')]
        )
    )
    assert meta.read(0).target == 3 and meta.read(0).fields == {"txt": "a cat", "__key__": "1"}
    named = TarSource(
        write_tar(tmp_path / "c.tar", [("1.wav", b"sound"), ("1.who", b"me")]),
        data="wav",
        target="who",
    )
    assert bytes(named.read(0).data) == b"sound" and named.read(0).target == b"me"


def test_an_error_in_one_sample_names_that_sample(tmp_path: Path) -> None:
    members = [
        *pairs(2),
        ("2.cls", b"1"),
        ("3.jpg", b"x"),
        ("4.jpg", b"x"),
        ("4.cls", b"\xff\xfe"),
        ("5.jpg", b"x"),
        ("5.cls", b"9"),
    ]
    source = TarSource(write_tar(tmp_path / "x.tar", members), num_classes=9)
    for number, reason in (
        (2, "has no image, only cls"),
        (3, "has no cls, only jpg"),
        (4, "bytes but not text"),
        (5, "expected 0 to 8"),
    ):
        with pytest.raises(BadSample, match=reason):
            source.read(number)
    assert source.targets().tolist() == [0, 1, -1, -1, -1, -1]


def test_a_cut_at_any_place_costs_only_what_it_hit(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "x.tar", pairs(6))
    content, reference = whole.read_bytes(), read_all(TarSource(whole))
    end = 6 * 4 * 512 - 512  # behind the last member; the first image is empty
    cut = tmp_path / "cut.tar"
    for length in range(100, end, 237):
        cut.write_bytes(content[:length])
        source = TarSource(cut)
        found = read_all(source)
        good = [sample for sample in found if sample]
        assert good == reference[: len(good)], length
        assert found[-1] is None and found.count(None) <= 2, length
        complete = (length + 512) // 2048 if length > 1536 else 0
        assert len(good) >= complete - 1, length


def test_a_damaged_header_costs_its_sample_only(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "x.tar", pairs(10))
    content, reference = whole.read_bytes(), read_all(TarSource(whole))
    damaged = tmp_path / "damaged.tar"
    for header in range(0, 10 * 2048 - 1024, 512):
        changed = bytearray(content)
        changed[header + 3] ^= 16
        damaged.write_bytes(changed)
        found = read_all(TarSource(damaged))
        good = [sample for sample in found if sample]
        hit = [sample for sample in reference if sample not in good]
        assert len(hit) <= 1, header
        changed_content = [sample for sample in good if sample not in reference]
        assert len(changed_content) <= 1, header  # an image or label has no checksum
        assert None in found or changed_content or good == reference, header


def test_zeros_in_the_middle_are_damage_and_not_the_end(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", pairs(10))
    content, reference = bytearray(path.read_bytes()), read_all(TarSource(path))
    content[2048 * 3 : 2048 * 4] = bytes(2048)
    path.write_bytes(content)
    found = read_all(TarSource(path))
    assert None in found and [sample for sample in found if sample][-5:] == reference[-5:]


@pytest.mark.parametrize("samples", [8, 40])
def test_zeros_up_to_the_end_are_no_end_mark(tmp_path: Path, samples: int) -> None:
    """A file whose rest was reserved and never written: the end mark of a tar is at most a record."""
    path = write_tar(tmp_path / "x.tar", pairs(samples))
    content = bytearray(path.read_bytes())
    start = next(one.header for one in members(content) if one.name == "0004.jpg")
    content[start:] = bytes(20_000 if samples == 8 else len(content) - start)
    path.write_bytes(content)
    found = read_all(TarSource(path))
    assert len(found) == 5 and found[-1] is None and None not in found[:4]
    with pytest.raises(BadSample, match=r"bytes of zeros up to the end of the file, expected at"):
        TarSource(path).read(4)


@pytest.mark.parametrize("blocks", [2, 3, 20, 21])
def test_end_marks_of_other_programs(tmp_path: Path, blocks: int) -> None:
    """busybox writes two blocks; others fill up to a record of 20."""
    path = write_tar(tmp_path / "x.tar", pairs(3))
    whole = path.read_bytes().rstrip(b"\0")
    size = -(-len(whole) // 512) * 512
    path.write_bytes(whole.ljust(size + blocks * 512, b"\0"))
    assert None not in read_all(TarSource(path))


@OFTEN
@given(st.binary(max_size=2000), st.integers(0, 8))
def test_any_bytes_can_be_walked_through(content: bytes, blocks: int) -> None:
    start = HEADER * blocks + content
    found = list(members(memoryview(start)))
    assert (
        all(0 <= one.header <= len(start) for one in found) and len(found) <= len(start) // 512 + 2
    )


@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"\xff" * 12, b"7777777777\0\0", b"notanumber\0\0"]
)
def test_a_size_that_cannot_be_ends_the_walk(size: bytes) -> None:
    header = bytearray(HEADER)
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (only,) = members(memoryview(bytes(header) + bytes(1024) + b"x"))
    assert isinstance(only, Lost)


def test_with_checksums_later_damage_is_found(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", pairs(3))
    TarSource(path, checksum=True)
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[content.index(b"image 2")] ^= 1
    path.write_bytes(content)
    # A bad disk does not change the time of a file.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = read_all(TarSource(path))
    assert found[0] and found[1] and found[2] is None


def test_packed_and_remote_tars_and_pickling(tmp_path: Path, capfd: Any) -> None:
    fsspec = pytest.importorskip("fsspec")
    path = write_tar(tmp_path / "x.tar.gz", pairs(5), mode="w:gz")
    source = TarSource(path)
    reference = read_all(source)
    assert (
        len(reference) == 5
        and None not in reference
        and "unpacking it once" in capfd.readouterr().err
    )
    assert read_all(pickle.loads(pickle.dumps(source))) == reference
    plain = write_tar(tmp_path / "x.tar", pairs(5))
    fsspec.filesystem("memory").pipe("/tars/x.tar", plain.read_bytes())
    try:
        assert read_all(TarSource("memory://tars/x.tar")) == reference
    finally:
        fsspec.filesystem("memory").rm("/tars", recursive=True)


def test_a_file_that_is_no_tar_is_one_bad_sample(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(bytes(range(256)) * 20)
    source = TarSource(tmp_path / "x.tar")
    with pytest.raises(BadSample, match="without a sound tar header") as caught:
        source.read(0)
    assert caught.value.number == 0 and caught.value.place == source.place(0)
    (tmp_path / "empty.tar").write_bytes(b"")
    # A copy that was interrupted at once: a whole tar has an end mark of 1,024 bytes.
    with pytest.raises(BadSample, match="ends at byte 0 without a tar's end mark"):
        TarSource(tmp_path / "empty.tar").read(0)
    with pytest.raises(DataError, match="no such file"):
        TarSource(tmp_path / "nowhere.tar")


def flip(path: Path, offset: int) -> None:
    """An ordinary write: the file gets a new time."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))


def test_checksums_outlive_a_change_until_new_ones_are_stored(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*pairs(4), *pairs(2)])  # keys that come twice
    TarSource(path, checksum=True)
    flip(path, path.read_bytes().index(b"image 2"))
    for source in (TarSource(path), TarSource(path), TarSource(path, checksum=True)):
        assert [sample is None for sample in read_all(source)] == [
            False,
            False,
            True,
            False,
            False,
            False,
        ]
    with pytest.raises(
        BadSample, match=r"changed since checksums were stored; .* `allstep data index --checksum`"
    ):
        TarSource(path).read(2)
    write_tar(path, [("new.jpg", b"n"), ("new.cls", b"1"), *pairs(2)])
    assert None not in read_all(TarSource(path))
    flip(path, path.read_bytes().index(b"n" + bytes(511)))  # of a sample that came later
    assert [sample is None for sample in read_all(TarSource(path))] == [True, False, False]
    TarSource(path, checksum=True, again=True)
    assert None not in read_all(TarSource(path))


def test_damage_to_a_packed_tar_makes_all_of_it_doubtful(tmp_path: Path, capfd: Any) -> None:
    noise = [(f"{row:02}.jpg", random.Random(row).randbytes(20_000)) for row in range(10)]
    path = write_tar(
        tmp_path / "x.tar.gz", [*noise, ("99.jpg", b"x"), ("99.cls", b"1")], mode="w:gz"
    )
    whole = path.read_bytes()
    path.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])  # gzip's CRC
    source = TarSource(path)
    assert len(source) and set(read_all(source)) == {None}
    with pytest.raises(BadSample, match="compressed bytes of its shard are damaged"):
        source.read(0)
    path.write_bytes(whole[: len(whole) // 2])  # cut, but what is there is right
    found = read_all(TarSource(path, target=""))
    assert found[-1] is None and [bytes(one.data) for one in found if one] == [
        data for _, data in noise[: len(found) - 1]
    ]


def test_another_process_does_not_take_another_shard_for_this_one(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", pairs(5))
    pickled = pickle.dumps(TarSource(path))
    write_tar(path, pairs(30))
    with pytest.raises(DataError, match=r"x.tar: was changed after it was opened"):
        pickle.loads(pickled)


def test_a_label_is_not_made_up_for_samples_behind_bad_ones(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*((f"{row}.jpg", b"x") for row in range(101))])
    TarSource(path, checksum=True, target="")
    content = bytearray(path.read_bytes())
    for row in range(100):
        content[row * 1024 + 512] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadSample, match="no member is known as its label, it has only jpg"):
        TarSource(path).read(100)
