"""`open_source` chooses the source by names and content.

A small dataset of each kind is opened by its folder, file, pattern and list.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allstep.data.opening import open_source
from allstep.data.sources import idx
from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
from allstep.data.sources.folder import FolderSource
from allstep.data.sources.tar.source import TarSource
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.framing import frame
from allstep.data.sources.tfrecord.source import TFRecordSource
from allstep.errors import DataError
from support.image_folders import aged


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def test_tfrecords(folder: Path) -> None:
    for number in range(3):
        (folder / f"x-{number:05}-of-00003.tfrecord").write_bytes(
            frame(encode({"image": b"x", "label": number}))
        )
    names = sorted(folder.glob("x-*"))
    for where in (
        folder,
        str(folder / "x-*.tfrecord"),
        f"{folder}/x-{{00000..00002}}-of-00003.tfrecord",
        names,
        f"file://{folder}",
    ):
        source = open_source(where)
        assert isinstance(source, TFRecordSource) and source.targets().tolist() == [0, 1, 2]
    assert open_source(names[1]).targets().tolist() == [1]
    assert bytes(open_source(folder, features={}).read(0).data) == encode(
        {"image": b"x", "label": 0}
    )
    assert open_source(folder, labels_from=1, num_classes=2).targets().tolist() == [-1, 0, 1]


def test_tars(folder: Path) -> None:
    (folder / "x-0.tar").write_bytes(bytes(1024))
    assert isinstance(open_source(folder), TarSource) and isinstance(
        open_source(folder / "x-0.tar"), TarSource
    )


def test_idx_files(folder: Path) -> None:
    for part, n in (("train", 3), ("t10k", 2)):
        idx.write(folder / f"{part}-images-idx3-ubyte", np.zeros((n, 4, 4), np.uint8))
        idx.write(folder / f"{part}-labels-idx1-ubyte.gz", np.zeros(n, np.uint8))
    assert isinstance(open_source(folder), IdxSource)
    assert len(open_source(folder)) == 3 and len(open_source(folder, train=False)) == 2
    assert len(open_source(folder / "t10k-images-idx3-ubyte")) == 2
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="its labels in the same folder: train-labels-idx1-ubyte"):
        open_source(folder)


def test_cifar(folder: Path) -> None:
    (folder / "data_batch_1.bin").write_bytes(bytes(3073 * 2))
    (folder / "test_batch.bin").write_bytes(bytes(3073))
    assert isinstance(open_source(folder), CifarSource)
    assert len(open_source(folder)) == 2 and len(open_source(folder, train=False)) == 1


def test_class_folders(folder: Path) -> None:
    (folder / "cat").mkdir()
    (folder / "cat" / "x.jpg").write_bytes(b"x")
    assert isinstance(open_source(aged(folder)), FolderSource)


def test_a_source_is_a_source() -> None:
    source = ArraySource(np.zeros((2, 2)), np.zeros(2))
    assert open_source(source) is source


def test_unknown_content_is_an_error(folder: Path) -> None:
    with pytest.raises(DataError, match=r"expected TFRecord files, .* found nothing"):
        open_source(folder)
    for name in "abcdefg":
        (folder / name).write_text("x")
    with pytest.raises(DataError, match="found a, b, c, d, e and 2 more"):
        open_source(folder)
    with pytest.raises(DataError, match="expected the name of TFRecord files, tar files"):
        open_source(folder / "a")
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(folder / "zz")
    with pytest.raises(DataError, match="no such file or folder"):
        open_source(f"{folder}/x-{{0..3}}.tfrecord")
    with pytest.raises(DataError, match="has no TFRecord files"):
        open_source(f"{folder}/*.tfrecord")


def test_an_empty_name_is_not_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "cat").mkdir()
    (folder / "cat" / "x.jpg").write_bytes(b"x")
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match="no path given"):
        open_source("")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"x-0.tar": bytes(1024), "notes.md": b""}, TarSource),
        (
            {"x.tfrecord": frame(encode({"image": b"x", "label": 0})), "classes.txt": b"a"},
            TFRecordSource,
        ),
        (
            {"cat/x.jpg": b"", "dog/y.jpg": b""},
            "only TFRecord and tar files are read from a URL, found cat, dog; copy it",
        ),
        (
            {"train-images-idx3-ubyte": b"", "train-labels-idx1-ubyte": b""},
            "found train-images-idx3-ubyte, train-labels",
        ),
    ],
)
def test_a_folder_behind_a_url(content: dict[str, bytes], kind: Any) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe({f"/v1.0/set/{name}": data for name, data in content.items()})
    try:
        for url in ("memory://v1.0/set", "memory://v1.0/set/"):
            if isinstance(kind, str):
                with pytest.raises(DataError, match=kind):
                    open_source(url)
            else:
                assert isinstance(open_source(url), kind)
    finally:
        memory.rm("/v1.0", recursive=True)


def test_what_is_read_from_the_disk_only_is_an_error_for_a_url() -> None:
    pytest.importorskip("fsspec")
    for name in ("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz", "data_batch_1.bin"):
        with pytest.raises(
            DataError, match="only TFRecord and tar files are read from a URL; copy it"
        ):
            open_source(f"memory://nowhere/{name}")
    with pytest.raises(DataError, match="only TFRecord and tar files are read from a URL"):
        FolderSource("memory://nowhere")
    with pytest.raises(DataError, match="expected the name of TFRecord files, tar files"):
        open_source("memory://nowhere")


def test_what_has_no_test_part_does_not_give_the_training_set(folder: Path) -> None:
    def refused(where: Path) -> bool:
        with pytest.raises(
            DataError, match="only folders of idx files and of CIFAR-10 contain a test split"
        ):
            open_source(where, train=False)
        return True

    (folder / "tars").mkdir()
    (folder / "tars" / "x.tar").write_bytes(bytes(1024))
    assert refused(folder) and refused(folder / "tars") and refused(folder / "tars" / "x.tar")
    idx.write(folder / "train-images-idx3-ubyte", np.zeros((2, 4, 4), np.uint8))
    idx.write(folder / "train-labels-idx1-ubyte", np.zeros(2, np.uint8))
    assert (
        len(open_source(folder)) == 2
        and refused(folder)
        and refused(folder / "train-images-idx3-ubyte")
    )


@pytest.mark.usefixtures("processes")
def test_opening_needs_no_torch() -> None:
    code = (
        "import sys, allstep.data.opening; sys.exit('torch' in sys.modules or 'fsspec' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_file_of_cifar_is_an_error(folder: Path) -> None:
    for number in (1, 2, 4, 5):
        (folder / f"data_batch_{number}.bin").write_bytes(bytes(3073 * 2))
    with pytest.raises(
        DataError,
        match=r"data_batch_3\.bin is missing; copy it, or select the other files with a pattern",
    ):
        open_source(folder)
    assert len(open_source(str(folder / "data_batch_*.bin"))) == 8
    (folder / "data_batch_3.bin").write_bytes(bytes(3073 * 2))
    assert open_source(folder).notes == ()
    (folder / "data_batch_5.bin").unlink()
    (note,) = open_source(folder).notes
    assert "has 4 of the 5 training files" in note


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.tar", "x.tfrecord"], r"both TFRecord files and tar files \(a\.tar, x\.tfrecord\)"),
        (["a.tar", "b.tar.xz"], r"cannot read b\.tar\.xz, expected \.tar, \.tar\.gz or \.tgz"),
        (["a.tar", "a.tar.gz"], r"a\.tar and a\.tar\.gz contain the same samples"),
        (["a.tar", "a.tgz"], r"a\.tar and a\.tgz contain the same samples"),
        (
            ["x-00000-of-00001.tar", "x-00000-of-00002.tar", "x-00001-of-00002.tar"],
            "contains shards of two datasets",
        ),
        (["x-00000-of-00002.tar"], "1 of 2 shards are missing, the first is x-00001-of-00002.tar"),
    ],
)
def test_a_folder_of_which_some_would_be_read_or_twice(
    folder: Path, names: list[str], message: str
) -> None:
    """In a local folder and at a URL."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for name in names:
        (folder / name).write_bytes(bytes(1024))
        memory.pipe(f"/mixed/{name}", bytes(1024))
    try:
        for where in (folder, "memory://mixed/", "memory://mixed"):
            with pytest.raises(DataError, match=message):
                open_source(where)
    finally:
        memory.rm("/mixed", recursive=True)


def test_endings_in_capitals(folder: Path) -> None:
    (folder / "X.TAR").write_bytes(bytes(1024))
    assert isinstance(open_source(folder), TarSource)
