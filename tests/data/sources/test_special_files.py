"""Pipes and devices in the place of data files: an error or a bad sample, never a wait or an
endless read."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allstep.data.sources import shards
from allstep.data.sources.arrays import CifarSource
from allstep.data.sources.class_folders import FolderSource
from allstep.data.sources.shards import read_classes
from allstep.data.sources.source import BadSample
from allstep.errors import DataError
from support.image_folders import aged, make_folder
from support.ranks import clean_environment


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [pipe, endless])
def test_a_image_that_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make_folder(tmp_path / "src", per_class=2)
    folder = next(path for path in (tmp_path / "src").iterdir() if path.is_dir())
    make(folder / "zzz.jpg")
    source = FolderSource(aged(tmp_path / "src"), checksum=True)
    [number] = [each for each in range(len(source)) if source.path(each).name == "zzz.jpg"]
    with pytest.raises(BadSample, match="is not a regular file"):
        source.read(number)


@pytest.mark.parametrize(
    "kind", ["link to nothing", "link to itself", "folder", "not UTF-8", "holes"]
)
def test_names_of_classes_that_cannot_be_read_are_an_error(tmp_path: Path, kind: str) -> None:
    """Without them labels would get other numbers, in silence."""
    place = tmp_path / "classes.txt"
    shard = str(tmp_path / "a.tar")
    assert read_classes(shard) == ((), None)
    place.write_text("red\nblue\n")
    assert read_classes(shard) == (("red", "blue"), None)
    place.unlink()
    if kind == "folder":
        place.mkdir()
    elif kind == "not UTF-8":
        place.write_bytes(b"\xff")
    elif kind == "holes":
        place.touch()
        os.truncate(place, 3 << 30)
    else:
        place.symlink_to("classes.txt" if kind == "link to itself" else "nothing")
    with pytest.raises(DataError, match=r"classes\.txt: "):
        read_classes(shard)


@pytest.mark.parametrize(
    ("error", "is_there"),
    [
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (TimeoutError(), True),
        (ConnectionError(), True),
    ],
)
def test_names_of_classes_at_a_server(
    error: OSError, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str) -> None:
        raise DataError(f"{url}: {error!r}") from error

    monkeypatch.setattr(shards, "open_file", fail)
    if is_there:
        with pytest.raises(
            DataError, match=r"s3://bucket/classes\.txt: .*labels are numbered by it"
        ):
            read_classes("s3://bucket/a.tar")
    else:
        names, refusal = read_classes("s3://bucket/a.tar")
        assert names == () and (refusal is not None) == isinstance(error, PermissionError)


def test_a_class_folder_that_is_a_link_to_itself_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "src", per_class=1)
    (tmp_path / "src" / "loop").symlink_to("loop")
    with pytest.raises(DataError, match=r"src/loop: Too many levels of symbolic links"):
        FolderSource(tmp_path / "src")


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [pipe, endless])
def test_files_next_to_packed_shards(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """As a user meets it: opening the set ends, with or without an error, within bounded memory."""
    make_folder(tmp_path / "src", per_class=3)
    packed = tmp_path / "packed"
    allstep("data", "pack", tmp_path / "src", packed)
    [index] = packed.glob(".*allstep-index")
    for name in (index.name, "classes.txt"):
        (packed / name).unlink()
        make(packed / name)
        done = allstep("data", "info", packed)
        assert done.returncode in (0, 2) and b"Traceback" not in done.stderr, done.stderr


def allstep(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    command = [sys.executable, "-m", "allstep", *map(str, arguments)]
    return subprocess.run(
        command, env=clean_environment(), capture_output=True, timeout=50, preexec_fn=limit
    )


def test_too_many_names_of_classes(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(bytes(3073 * 2))
    (tmp_path / "batches.meta.txt").write_text("x\n" * 257)
    with pytest.raises(DataError, match="names 257 classes, expected at most 256"):
        CifarSource(tmp_path / "data_batch_1.bin")
    (tmp_path / "batches.meta.txt").write_text("x\n" * 600_000)
    with pytest.raises(DataError, match="is larger than"):
        CifarSource(tmp_path / "data_batch_1.bin")
