"""Impossible numbers in tar files: each costs its own sample, and the others of the tar are
read.

The reference are the samples that were written; only the second of three is damaged.
"""

import tarfile
import time
from pathlib import Path

import pytest

from allstep.data.inspect.info import info
from allstep.data.sources.source import BadSample
from allstep.data.sources.tar.scan import Lost, Member, members
from allstep.data.sources.tar.source import TarSource

BLOCK = 512
END = bytes(2 * BLOCK)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def filled(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def header(name: str, size: int, kind: bytes = b"0", size_field: bytes | None = None) -> bytes:
    """A header with a right sum; `size_field` replaces the 12 bytes of the size."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if size_field is not None:
        block[124:136] = size_field
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, content: bytes, size_field: bytes | None = None) -> bytes:
    return header(name, len(content), size_field=size_field) + filled(content)


def sample(row: int, size_field: bytes | None = None, pax: bytes | None = None) -> bytes:
    """An image and its class; the size of the image, or what describes it, may be damaged."""
    extended = b"" if pax is None else header("pax", len(pax), b"x") + filled(pax)
    image = member(f"{row:04}.jpg", b"image %d" % row * 100, size_field)
    return extended + image + member(f"{row:04}.cls", b"%d" % row)


def record(key: bytes, value: bytes) -> bytes:
    """A line of a POSIX extended header: its own length, key and value."""
    length = len(key) + len(value) + 3
    while length != len(b"%d %s=%s\n" % (length, key, value)):
        length = len(b"%d %s=%s\n" % (length, key, value))
    return b"%d %s=%s\n" % (length, key, value)


BINARY_NEGATIVE = b"\xff" * 11 + b"\xfe"
BINARY_HUGE = b"\x80" + b"\xff" * 11
DAMAGED = {
    "length of 5,000 digits": sample(1, pax=b"9" * 5000 + b" path=x\n"),
    "size of 5,000 digits": sample(1, pax=record(b"size", b"9" * 5000)),
    "size of 20 digits": sample(1, pax=record(b"size", b"9" * 20)),
    "negative pax size": sample(1, pax=record(b"size", b"-1")),
    "pax size with a sign": sample(1, pax=record(b"size", b"+800")),
    "pax size that is text": sample(1, pax=record(b"size", b"large")),
    "line that is too long": sample(1, pax=b"99 path=x\n"),
    "line of length 0": sample(1, pax=b"0 path=x\n"),
    "line without a length": sample(1, pax=b"path=x\n"),
    "negative binary size": sample(1, BINARY_NEGATIVE),
    "binary size of 88 bits": sample(1, BINARY_HUGE),
    "other first byte": sample(1, b"\xc0" + bytes(11)),
    "octal size beyond the file": sample(1, b"77777777777\0"),
    "negative octal size": sample(1, b"-0000000001\0"),
    "octal size with an underscore": sample(1, b"0000_000123\0"),
    "size that is text": sample(1, b"many bytes.\0"),
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_number_that_cannot_be_costs_its_own_sample(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(sample(0) + damaged + sample(2) + sample(3) + END)
    source = TarSource(path)
    good: dict[str, int] = {}
    bad: list[BadSample] = []
    for number in range(len(source)):
        try:
            read = source.read(number)
            assert bytes(read.data) == b"image %d" % read.target * 100
            good[read.fields["__key__"]] = read.target
        except BadSample as error:
            bad.append(error)
    assert good == {"0000": 0, "0002": 2, "0003": 3}
    # Where the image's name is lost as well, its class may be a sample of its own.
    assert 1 <= len(bad) <= 2 and all(
        "\n" not in str(each) and len(str(each)) < 500 for each in bad
    )


def test_sizes_that_can_be_are_read() -> None:
    content = b"content" * 200
    octal, binary = b"%011o " % len(content), b"\x80" + len(content).to_bytes(11, "big")
    pax = record(b"size", b"%d" % len(content)) + record(b"path", b"long/name.jpg") + bytes(3)
    tar = member("a.jpg", content, octal) + member("b.jpg", content, binary)
    tar += header("pax", len(pax), b"x") + filled(pax) + member("c.jpg", content, b"0" * 11 + b"\0")
    found = list(members(memoryview(tar + END)))
    assert all(isinstance(each, Member) and each.size == len(content) for each in found)
    assert [each.name for each in found] == ["a.jpg", "b.jpg", "long/name.jpg"]


@pytest.mark.parametrize("kind", [b"x", b"L"])
def test_an_extended_header_of_megabytes_is_damage(kind: bytes) -> None:
    """It would be copied into memory: 8 GB, if its header has that size."""
    name = b"n" * (2 << 20)
    content = record(b"path", name) if kind == b"x" else name
    tar = (
        header("pax", len(content), kind)
        + filled(content)
        + member("a.jpg", b"a")
        + member("b.jpg", b"b")
    )
    lost, first, second = members(memoryview(tar + END))
    assert isinstance(lost, Lost) and "expected at most 1048576" in lost.reason
    assert (first.name, second.name) == ("a.jpg", "b.jpg")


def test_many_damaged_places_in_a_large_tar_take_time_in_proportion() -> None:
    """Each of them used to look at all the rest of the file."""
    content = bytes(range(256)) * 256
    good = member("a.jpg", content)
    gap = b"x" * BLOCK + bytes(BLOCK)

    def seconds(count: int) -> float:
        tar = memoryview((good + gap) * count + END)
        start = time.process_time()
        assert len(list(members(tar))) == 2 * count
        return time.process_time() - start

    seconds(10)
    few, many = seconds(100), seconds(800)
    assert many < 30 * few, (few, many)


def test_a_label_that_no_tensor_holds_is_a_bad_sample(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    labels = (
        b'{"label": 1}',
        b'{"label": %s}' % (b"9" * 4000),
        b'{"label": %s}' % (b"9" * 5000),
        b'{"label": 2}',
    )
    path.write_bytes(
        b"".join(
            member(f"{n}.jpg", b"x") + member(f"{n}.json", text) for n, text in enumerate(labels)
        )
        + END
    )
    source = TarSource(path)
    assert source.targets().tolist() == [1, -1, -1, 2]
    with pytest.raises(BadSample, match="its label has 4000 digits"):
        source.read(1)


def test_one_huge_label_does_not_make_a_huge_table(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(
        b"".join(member(f"{n}.jpg", b"x") + member(f"{n}.cls", b"%d" % n**17) for n in (0, 2, 9))
        + END
    )
    assert info(TarSource(path), "x").classes == (("0", 1), (str(2**17), 1), (str(9**17), 1))
