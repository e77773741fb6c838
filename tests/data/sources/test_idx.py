"""idx files: read back as written; an error names the file and its bytes."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data.sources import idx
from allstep.errors import DataError
from allstep.machine import Memory

IMAGES = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
CONTENT = bytes([0, 0, 8, 3]) + struct.pack(">III", 5, 3, 2) + IMAGES.tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str, dtype: str) -> None:
    path = tmp_path / f"array{suffix}"
    idx.write(path, IMAGES.astype(dtype))
    array = idx.read(path)
    assert array.dtype.kind + str(array.dtype.itemsize) == dtype
    np.testing.assert_array_equal(array, IMAGES)


def test_reads_the_format_as_it_is_defined(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(CONTENT)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(CONTENT))
    np.testing.assert_array_equal(idx.read(tmp_path / "plain"), IMAGES)
    np.testing.assert_array_equal(idx.read(tmp_path / "packed.gz"), IMAGES)
    assert isinstance(idx.read(tmp_path / "plain"), np.memmap)


def test_no_samples(tmp_path: Path) -> None:
    for name in ("plain", "packed.gz"):
        idx.write(tmp_path / name, np.zeros((0, 4), np.uint8))
        assert idx.read(tmp_path / name).shape == (0, 4)


@settings(deadline=None)
@given(cut=st.integers(0, len(CONTENT) - 1))
def test_a_truncated_file_names_expected_and_found(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "train-images"
    path.write_bytes(CONTENT[:cut])
    expected = len(CONTENT) if cut >= 16 else 16 if cut >= 4 else 4
    with pytest.raises(
        DataError, match=rf"train-images: .*expected .*{expected} bytes.* found {cut}$"
    ):
        idx.read(path)


@settings(deadline=None)
@given(data=st.data())
def test_a_truncated_gz_is_an_error_wherever_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "images.gz"
    packed = gzip.compress(CONTENT)
    path.write_bytes(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(DataError, match=r"images\.gz: .*(expected|truncated|gzip)"):
        idx.read(path)


def test_a_truncated_gz_names_unpacked_bytes(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1000, 28, 28), dtype=np.uint8)
    path = tmp_path / "images.gz"
    idx.write(path, noise)
    path.write_bytes(path.read_bytes()[:400_000])
    with pytest.raises(
        DataError, match=r"images\.gz: is truncated: expected 784016 unpacked bytes, found 3\d{5}$"
    ):
        idx.read(path)


@settings(deadline=None)
@given(where=st.integers(0, 79), bit=st.integers(0, 7))
def test_a_flipped_bit_never_goes_unseen(
    tmp_path_factory: pytest.TempPathFactory, where: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("bit") / "images.gz"
    packed = bytearray(gzip.compress(CONTENT, mtime=0))
    packed[where % len(packed)] ^= 1 << bit
    path.write_bytes(packed)
    try:
        array = idx.read(path)
    except DataError:
        return
    np.testing.assert_array_equal(array, IMAGES)  # a bit of gzip's header that means nothing


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\x89PNG\r\n\x1a\n", "is not an idx file.*found 0x89504e47"),
        (b"\0\0\x07\x01\0\0\0\0", "is not an idx file.*found 0x00000701"),
        (b"\0\0\x08\0", "is not an idx file"),
        (CONTENT + b"!", "has trailing bytes: expected 46, found at least 47"),
    ],
)
def test_wrong_content(tmp_path: Path, suffix: str, content: bytes, complaint: str) -> None:
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=complaint):
        idx.read(path)


def test_a_gz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(CONTENT)
    with pytest.raises(DataError, match=r"images\.gz: is not a complete gzip file"):
        idx.read(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="images: No such file"):
        idx.read(tmp_path / "images")
    with pytest.raises(DataError, match="Is a directory"):
        idx.read(tmp_path)


def test_a_pair_must_fit(tmp_path: Path) -> None:
    images, labels = tmp_path / "images", tmp_path / "labels"
    idx.write(images, IMAGES)
    idx.write(labels, np.zeros(4, np.uint8))
    with pytest.raises(
        DataError, match="labels: expected 5 labels, as many as images in images, found 4"
    ):
        idx.read_pair(images, labels)
    with pytest.raises(DataError, match="images: expected labels with 1 dimension, found 3"):
        idx.read_pair(images, images)
    with pytest.raises(DataError, match="labels: expected images with 2 dimensions"):
        idx.read_pair(labels, labels)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ((1,) * 200, "expected at most 32 dimensions, found 200"),
        ((0, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), "its dimensions .* are too large for any file"),
        ((0xFFFFFFFF, 28, 28), "is truncated: expected"),
    ],
)
def test_dimensions_that_cannot_be(
    tmp_path: Path, suffix: str, shape: tuple[int, ...], complaint: str
) -> None:
    """numpy raises errors of its own for the first two, and the third is never tried in memory."""
    path = tmp_path / f"array{suffix}"
    content = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(2000)
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=complaint):
        idx.read(path)


def test_images_without_pixels_are_refused(tmp_path: Path) -> None:
    """No operation of a transform can do anything with them."""
    idx.write(tmp_path / "images", np.zeros((5, 0, 28), np.uint8))
    idx.write(tmp_path / "labels", np.zeros(5, np.uint8))
    with pytest.raises(
        DataError, match=r"expected images with 1 pixel or more, found shape \(5, 0, 28\)"
    ):
        idx.read_pair(tmp_path / "images", tmp_path / "labels")


def test_a_packed_array_larger_than_memory_is_refused_before_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand times its size on the disk: the error has the unpacked size."""
    path = tmp_path / "array.gz"
    idx.write(path, np.zeros((2000, 1000), np.uint8))
    monkeypatch.setattr(idx, "memory", lambda: Memory(4_000_000, 3_900_000, None))
    with pytest.raises(
        DataError, match=r"unpack to 2 MB, and 3.9 MB of memory are free; unpack it \(gunzip\)"
    ):
        idx.read(path)
    monkeypatch.setattr(idx, "memory", lambda: Memory(5_000_000, 4_100_000, None))
    assert idx.read(path).shape == (2000, 1000)
