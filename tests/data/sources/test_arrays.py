"""Arrays, idx pairs and CIFAR-10's files as sources. The reference is the original array."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from allstep.data.sources import idx
from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
from allstep.data.sources.source import BadSample
from allstep.errors import DataError

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (20, 5, 4, 3), np.uint8)
LABELS = RANDOM.integers(0, 10, 20)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def test_rows_are_samples_and_blocks_are_rows() -> None:
    source = ArraySource(IMAGES, LABELS, classes=tuple("abcdefghij"))
    numbers = RANDOM.permutation(20)
    block = source.block(numbers)
    assert (
        block is not None
        and np.array_equal(block.data, IMAGES[numbers])
        and np.array_equal(block.target, LABELS[numbers])
    )
    assert np.array_equal(source.read(7).data, IMAGES[7]) and source.read(7).target == LABELS[7]
    assert (
        isinstance(source.read(7).target, int)
        and len(source) == 20
        and np.array_equal(source.targets(), LABELS)
    )
    assert np.array_equal(pickle.loads(pickle.dumps(source)).read(7).data, IMAGES[7])
    for number in (-1, 20):
        with pytest.raises(IndexError):
            source.read(number)
        with pytest.raises(IndexError):
            source.block(np.array([0, number]))


def test_targets_may_be_arrays_and_blocks_empty() -> None:
    source = ArraySource(IMAGES, np.ones((20, 3)))
    assert source.read(0).target.shape == (3,) and set(source.targets()) == {-1}
    block = source.block(np.empty(0, np.int64))
    assert block is not None and block.data.shape == (0, 5, 4, 3)


def test_wrong_lengths_are_errors() -> None:
    with pytest.raises(
        DataError, match=r"data of shape \(20, 5, 4, 3\) and target of shape \(19,\)"
    ):
        ArraySource(IMAGES, LABELS[:19])
    with pytest.raises(DataError, match=r"target of shape \(\)"):
        ArraySource(IMAGES, 3)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_pairs_are_mapped_or_unpacked(tmp_path: Path, suffix: str) -> None:
    images, labels = (
        tmp_path / f"x-images-idx3-ubyte{suffix}",
        tmp_path / f"x-labels-idx1-ubyte{suffix}",
    )
    idx.write(images, IMAGES[..., 0])
    idx.write(labels, LABELS.astype(np.uint8))
    source = pickle.loads(pickle.dumps(IdxSource(images, labels)))
    block = source.block(np.arange(20)[::-1])
    assert np.array_equal(block.data, IMAGES[::-1, :, :, 0]) and np.array_equal(
        block.target, LABELS[::-1]
    )
    assert block.target.dtype == np.int64 and source.place(2).offset == 16 + 2 * 20
    if not suffix:
        place = source.place(3)
        assert images.read_bytes()[place.offset : place.offset + 20] == IMAGES[3, :, :, 0].tobytes()


def test_idx_in_another_byte_order_comes_in_ours(tmp_path: Path) -> None:
    images, labels = tmp_path / "i", tmp_path / "l"
    idx.write(images, RANDOM.normal(size=(3, 2, 2)).astype(np.float32))
    idx.write(labels, np.arange(3, dtype=np.uint8))
    assert IdxSource(images, labels).read(0).data.dtype == np.dtype("=f4")


def test_with_checksums_later_damage_is_found(tmp_path: Path) -> None:
    images, labels = tmp_path / "i", tmp_path / "l"
    idx.write(images, IMAGES[..., 0])
    idx.write(labels, LABELS.astype(np.uint8))
    reported: list[int] = []
    IdxSource(images, labels).index_checksums(lambda name, done, total: reported.append(done))
    assert reported[-1] == 20
    before = images.stat()
    content = bytearray(images.read_bytes())
    content[16 + 3 * 20] ^= 1
    images.write_bytes(content)
    # A bad disk does not change the time of a file.
    os.utime(images, ns=(before.st_atime_ns, before.st_mtime_ns))
    source = IdxSource(images, labels)
    with pytest.raises(BadSample, match=r"expected 0x[0-9a-f]{8} as in the index"):
        source.read(3)
    assert source.block(np.arange(5)) is None and source.block(np.arange(3)) is not None
    assert np.array_equal(source.read(4).data, IMAGES[4, :, :, 0])
    content = bytearray(labels.read_bytes())
    content[8 + 7] ^= 1
    labels.write_bytes(content)
    # a wrong label is as bad
    with pytest.raises(BadSample, match=r"expected 0x[0-9a-f]{8} as in the index"):
        IdxSource(images, labels).read(7)


def write_cifar(folder: Path, images: np.ndarray, labels: np.ndarray, name: str) -> None:
    rows = [
        bytes([label]) + one.transpose(2, 0, 1).tobytes()
        for one, label in zip(images, labels, strict=True)
    ]
    (folder / name).write_bytes(b"".join(rows))


def test_cifar_files_are_one_set_of_images(tmp_path: Path) -> None:
    images, labels = (
        RANDOM.integers(0, 256, (30, 32, 32, 3), np.uint8),
        RANDOM.integers(0, 10, 30),
    )
    for part in range(3):
        write_cifar(tmp_path, images[part::3], labels[part::3], f"data_batch_{part + 1}.bin")
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    whole, numbers = (
        np.concatenate([images[part::3] for part in range(3)]),
        np.concatenate([labels[part::3] for part in range(3)]),
    )
    source = pickle.loads(pickle.dumps(CifarSource(tmp_path)))
    order = RANDOM.permutation(30)
    block = source.block(order)
    assert np.array_equal(block.data, whole[order]) and np.array_equal(block.target, numbers[order])
    assert block.data.flags.c_contiguous and source.classes == tuple("abcdefghij")
    assert np.array_equal(source.read(11).data, whole[11]) and source.place(11).offset == 3073
    source.index_checksums()
    assert np.array_equal(CifarSource(tmp_path).read(11).data, whole[11])


def test_a_cifar_file_of_the_wrong_length_or_labels_is_an_error(tmp_path: Path) -> None:
    write_cifar(tmp_path, np.zeros((2, 32, 32, 3), np.uint8), np.array([1, 77]), "data_batch_1.bin")
    for source in (CifarSource(tmp_path), CifarSource(tmp_path, classes=tuple("abcdefghij"))):
        with pytest.raises(BadSample, match="its label is 77, expected 0 to 9"):
            source.read(1)
        assert source.read(0).target == 1 and source.targets().tolist() == [1, -1]
    with (tmp_path / "data_batch_1.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="expected rows of 3073 bytes, found 6147 bytes"):
        CifarSource(tmp_path)


def test_a_label_without_a_class_is_a_bad_sample(tmp_path: Path) -> None:
    source = ArraySource(IMAGES[:4], np.array([0, 200, 3, -1]), classes=tuple("abcd"))
    assert source.block(np.array([0, 1])) is None and source.block(np.array([3])) is None
    assert source.block(np.array([2, 0])) is not None and source.targets().tolist() == [
        0,
        -1,
        3,
        -1,
    ]
    for number in (1, 3):
        with pytest.raises(BadSample, match="expected 0 to 3"):
            source.read(number)
    idx.write(tmp_path / "i", IMAGES[..., 0])
    idx.write(tmp_path / "l", np.full(20, 7, np.uint8))
    with pytest.raises(BadSample, match="its label is 7, expected 0 to 3"):
        IdxSource(tmp_path / "i", tmp_path / "l", classes=tuple("abcd")).read(0)
    assert (
        ArraySource(IMAGES, LABELS.astype(float), classes=tuple("ab")).block(np.arange(20))
        is not None
    )


def idx_pair(folder: Path, n: int = 20) -> IdxSource:
    idx.write(folder / "images", IMAGES[:n, ..., 0])
    idx.write(folder / "labels", LABELS[:n].astype(np.uint8))
    return IdxSource(folder / "images", folder / "labels")


def test_checksums_of_rows_outlive_a_change(tmp_path: Path) -> None:
    idx_pair(tmp_path, 10).index_checksums()
    content = bytearray((tmp_path / "images").read_bytes())
    content[16 + 3 * IMAGES[0, ..., 0].size] ^= 1
    (tmp_path / "images").write_bytes(content)
    os.utime(tmp_path / "images", (1, 1))
    source = IdxSource(tmp_path / "images", tmp_path / "labels")
    with pytest.raises(BadSample, match="changed since checksums were stored"):
        source.read(3)
    assert source.block(np.array([3])) is None and source.block(np.array([2, 4])) is not None
    assert idx_pair(tmp_path, 20).block(np.arange(20)) is not None  # rows that were added
    assert idx_pair(tmp_path, 5).block(np.arange(5)) is not None


def test_another_process_does_not_take_another_file_for_this_one(tmp_path: Path) -> None:
    pickled = pickle.dumps(idx_pair(tmp_path))
    idx_pair(tmp_path, 19)
    with pytest.raises(DataError, match="images: was changed after it was opened"):
        pickle.loads(pickled)


def test_names_of_cifars_classes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073))
    (tmp_path / "batches.meta.txt").write_bytes(b"cat\n\xec\xff")
    with pytest.raises(DataError, match=r"batches.meta.txt: expected names of classes in UTF-8"):
        CifarSource(tmp_path)
