"""`allstep data index`: afterwards, damage is detected that no decoder would detect."""

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data.inspect.verify import verify
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.plan import Options
from allstep.data.sources import idx
from allstep.errors import DataError
from support.image_folders import make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def invoke(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, ["data", "index", *arguments])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def change(path: Path, offset: int, seconds: int = 0) -> None:
    """Flip a bit, and set the file's time `seconds` later: 0 as by a bad disk, 1 as by a write."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + seconds * 10**9))


def test_a_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos")
    assert "24 samples are indexed; with checksums" in invoke(str(folder), "--checksum")
    change(folder / "dog" / "000.jpg", -30)
    assert [bad.number for bad in verify(open_source(str(folder))).bad] == [8]


@pytest.mark.parametrize("seconds", [0, 1])
def test_idx_files(tmp_path: Path, seconds: int) -> None:
    idx.write(tmp_path / "train-images-idx3-ubyte", np.zeros((10, 4, 4), np.uint8))
    idx.write(tmp_path / "train-labels-idx1-ubyte", np.zeros(10, np.uint8))
    invoke(str(tmp_path), "--checksum")
    change(tmp_path / "train-images-idx3-ubyte", 16 + 3 * 16 + 5, seconds)
    assert [bad.number for bad in verify(open_source(str(tmp_path))).bad] == [3]
    invoke(str(tmp_path), "--checksum")
    assert not verify(open_source(str(tmp_path))).bad


@pytest.mark.parametrize("seconds", [0, 1])
def test_tars_are_packed_with_checksums(tmp_path: Path, seconds: int) -> None:
    folder = make_folder(tmp_path / "photos")
    pack(open_source(str(folder)), "photos", tmp_path / "out", Options("x", to="tar"))
    path = tmp_path / "out" / "x-00000-of-00001.tar"
    change(path, open_source(str(path)).place(5).offset + 512 + 400, seconds)
    # Only the checksum shows the change: the image can still be decoded.
    found = verify(open_source(str(path))).bad
    assert [bad.number for bad in found] == [5] and "CRC32C" in found[0].reason
    invoke(str(path), "--checksum")
    assert 5 not in {
        bad.number for bad in verify(open_source(str(path))).bad if "CRC32C" in bad.reason
    }


def test_tfrecords_have_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos")
    pack(open_source(str(folder)), "photos", tmp_path / "out", Options("x"))
    assert "its records have checksums already" in invoke(str(tmp_path / "out"), "--checksum")
    assert "24 samples are indexed\n" in invoke(str(tmp_path / "out"))


def test_checksums_that_cannot_be_stored_are_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "photos")
    pack(open_source(str(folder)), "photos", tmp_path / "out", Options("x", to="tar"))
    idx.write(tmp_path / "train-images-idx3-ubyte", np.zeros((10, 4, 4), np.uint8))
    idx.write(tmp_path / "train-labels-idx1-ubyte", np.zeros(10, np.uint8))
    monkeypatch.setattr("allstep.data.sources.index.write_index", lambda *_: False)
    for place in (folder, tmp_path / "out", tmp_path / "train-images-idx3-ubyte"):
        outcome = CliRunner().invoke(app, ["data", "index", str(place), "--checksum"])
        assert isinstance(outcome.exception, DataError) and "cannot be written" in str(
            outcome.exception
        )
        assert "with checksums" not in outcome.stdout
