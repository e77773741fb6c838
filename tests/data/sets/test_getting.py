"""Named datasets, copied from a folder or a server of this machine: right content only, and only
missing files."""

import gzip
import hashlib
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data import NAMED, find, load
from allstep.data.sets import catalogue as known
from allstep.data.sets.catalogue import CIFAR_FILES, FILES, Archive, NamedSet
from allstep.data.sets.download import get
from allstep.errors import DataError

N = 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with six files of CIFAR-10's layout and their archive."""
    folder = tmp_path / "home"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in CIFAR_FILES:
        rows = random.integers(0, 256, (N, 3073), np.uint8)
        rows[:, 0] = [3, 1, 9, 0]
        (folder / name).write_bytes(rows.tobytes())
    with tarfile.open(folder / "toy.tar.gz", "w:gz") as archive:
        for name in CIFAR_FILES:
            archive.add(folder / name, f"deep/inside/{name}")
    return folder


@pytest.fixture
def toy(home: Path, monkeypatch: pytest.MonkeyPatch) -> NamedSet:
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in home.iterdir()}
    archive = Archive("toy.tar.gz", sums.pop("toy.tar.gz"))
    toy = NamedSet("toy", "Toy", (), None, sums, layout="cifar", archive=archive)
    monkeypatch.setattr(known, "NAMED", {**NAMED, "toy": toy})
    return toy


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(home))) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def the_six(home: Path) -> dict[str, bytes]:
    return {name: (home / name).read_bytes() for name in CIFAR_FILES}


def test_from_a_folder_with_the_files(toy: NamedSet, home: Path, tmp_path: Path) -> None:
    get(toy, tmp_path / "to", home)
    assert contents(tmp_path / "to") == the_six(home)


def test_from_a_folder_with_the_archive(toy: NamedSet, home: Path, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    shutil.copy(home / "toy.tar.gz", tmp_path / "only")
    get(toy, tmp_path / "to", tmp_path / "only")
    assert contents(tmp_path / "to") == the_six(home)


@pytest.mark.parametrize("tail", ["", "/", "/toy.tar.gz"])
def test_from_a_server(toy: NamedSet, home: Path, url: str, tail: str, tmp_path: Path) -> None:
    get(toy, tmp_path / "to", url + tail)
    assert contents(tmp_path / "to") == the_six(home)


def test_idx_files_from_a_folder_and_from_a_server(home: Path, url: str, tmp_path: Path) -> None:
    digits = NAMED["digits"].folders[0]
    for path in digits.iterdir():
        shutil.copy(path, home)
    sums = {
        path.name.removesuffix(".gz"): content_sum(path)
        for path in digits.iterdir()
        if path.suffix == ".gz"
    }
    toy = NamedSet("toy", "Toy", sha256=sums)
    get(toy, tmp_path / "a", digits)
    get(toy, tmp_path / "b", f"{url}/")
    assert (
        contents(tmp_path / "a")
        == contents(tmp_path / "b")
        == {f"{n}.gz": (digits / f"{n}.gz").read_bytes() for n in sums}
    )


@pytest.mark.parametrize("source", ["files", "archive"])
def test_files_beyond_their_known_size_are_not_copied(
    toy: NamedSet, home: Path, tmp_path: Path, source: str
) -> None:
    known = replace(toy, nbytes=dict.fromkeys(CIFAR_FILES, N * 3073))
    get(known, tmp_path / "right", home)
    large = home / CIFAR_FILES[0]
    large.write_bytes(large.read_bytes() + bytes(1 << 22))
    if source == "archive":
        with tarfile.open(home / "toy.tar.gz", "w:gz") as archive:
            for name in CIFAR_FILES:
                archive.add(home / name, name)
                (home / name).unlink()
    with pytest.raises(
        DataError,
        match=r"data_batch_1.bin: is too large: expected at most 13438 bytes, found \d+ or more",
    ):
        get(known, tmp_path / "to", home)
    assert contents(tmp_path / "to") == {}


def test_an_archive_with_numbers_that_cannot_be_is_one_line(toy: NamedSet, tmp_path: Path) -> None:
    """Python's tarfile lets the ValueError of int() through."""
    (tmp_path / "from").mkdir()
    lines = b"9" * 5000 + b" path=x\n"
    extended = tarfile.TarInfo("x")
    extended.type, extended.size = tarfile.XHDTYPE, len(lines)
    content = (
        extended.tobuf()
        + lines
        + bytes(-len(lines) % 512)
        + tarfile.TarInfo("y").tobuf()
        + bytes(1024)
    )
    (tmp_path / "from" / "toy.tar.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="is not a complete archive") as caught:
        get(toy, tmp_path / "to", tmp_path / "from")
    assert "\n" not in str(caught.value)


def content_sum(path: Path) -> str:
    return hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()


def test_wrong_content_is_refused_and_the_right_files_stay(
    toy: NamedSet, home: Path, tmp_path: Path
) -> None:
    content = bytearray((home / CIFAR_FILES[2]).read_bytes())
    content[5] ^= 1
    (home / CIFAR_FILES[2]).write_bytes(content)
    with pytest.raises(
        DataError,
        match=f"{CIFAR_FILES[2]}: wrong content: expected SHA-256 {toy.sha256[CIFAR_FILES[2]]}",
    ):
        get(toy, tmp_path / "to", home)
    assert sorted(contents(tmp_path / "to")) == list(CIFAR_FILES[:2])


def test_a_cut_archive_leaves_no_half_file(toy: NamedSet, home: Path, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    packed = (home / "toy.tar.gz").read_bytes()
    (tmp_path / "only" / "toy.tar.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"toy\.tar\.gz: is not whole|is not a complete archive"):
        get(toy, tmp_path / "to", tmp_path / "only")
    for name, content in contents(tmp_path / "to").items():
        assert content == (home / name).read_bytes()


def test_files_with_the_right_names_and_other_content_are_refused(
    toy: NamedSet, home: Path, tmp_path: Path
) -> None:
    junk = dict.fromkeys(CIFAR_FILES, b"junk")
    (tmp_path / "to").mkdir()
    for name, content in junk.items():
        (tmp_path / "to" / name).write_bytes(content)
    with pytest.raises(
        DataError, match=f"{CIFAR_FILES[0]}: wrong content: .*; remove it, or choose another folder"
    ):
        get(toy, tmp_path / "to", home)
    assert contents(tmp_path / "to") == junk  # it may be a user's work
    for name in CIFAR_FILES[:-1]:
        shutil.copy(home / name, tmp_path / "to")
    with pytest.raises(DataError, match=CIFAR_FILES[-1]):
        get(toy, tmp_path / "to", home)
    (tmp_path / "to" / CIFAR_FILES[-1]).unlink()
    get(toy, tmp_path / "to", home)
    get(toy, tmp_path / "to", tmp_path / "nowhere")  # nothing is missing
    assert contents(tmp_path / "to") == the_six(home)


def test_a_packed_file_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    digits = NAMED["digits"].folders[0]
    sums = {
        path.name.removesuffix(".gz"): content_sum(path)
        for path in digits.iterdir()
        if path.suffix == ".gz"
    }
    shutil.copytree(digits, tmp_path / "to")
    (tmp_path / "to" / f"{FILES[1]}.gz").write_bytes(b"junk")
    with pytest.raises(DataError, match=rf"{FILES[1]}\.gz: is not a complete gzip file"):
        get(NamedSet("toy", "Toy", sha256=sums), tmp_path / "to", digits)


@pytest.mark.usefixtures("processes")
def test_kill_leaves_nothing_that_stays(toy: NamedSet, home: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom allstep.data.sets.http import"
        " locked, writing\nfolder = Path(sys.argv[1])\nwith locked(folder), writing(folder /"
        " '.toy.tar.gz') as a, writing(folder / 'test_batch.bin') as b:\n    b.write(b'half')\n   "
        " (folder / '.toy.tar.gz').write_bytes(b'whole, and not yet unpacked')\n   "
        " os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "to")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert set(contents(tmp_path / "to")) == {
        ".toy.tar.gz",
        "..toy.tar.gz.part",
        ".test_batch.bin.part",
    }
    get(toy, tmp_path / "to", home)
    assert contents(tmp_path / "to") == the_six(home)


def test_images_and_labels(toy: NamedSet, home: Path) -> None:
    images = load(find(toy, home))
    assert images.train.images.shape == (5 * N, 32, 32, 3)
    assert images.image_shape == (3, 32, 32)
    assert images.test.labels.tolist() == [3, 1, 9, 0]
    row = np.frombuffer((home / CIFAR_FILES[1]).read_bytes(), np.uint8).reshape(N, 3073)[2]
    for channel in range(3):  # the slow way round
        for y, x in [(0, 0), (5, 31), (31, 7)]:
            assert images.train.images[N + 2, y, x, channel] == row[1 + channel * 1024 + y * 32 + x]


def test_files_that_are_no_rows_or_have_other_labels(toy: NamedSet, home: Path) -> None:
    (home / "test_batch.bin").write_bytes(bytes(3074))
    with pytest.raises(DataError, match="expected rows of 3073 bytes, found 3074 bytes"):
        load(find(toy, home))
    (home / "test_batch.bin").write_bytes(bytes([10]) * 3073)
    with pytest.raises(DataError, match="expected labels 0 to 9, found 10 in row 0"):
        load(find(toy, home))


def test_a_set_that_the_system_has(tmp_path: Path) -> None:
    get(NAMED["digits"], tmp_path / "to")
    assert len(load(find(NAMED["digits"], tmp_path / "to")).train) == 1437


def test_names_of_classes_come_along(toy: NamedSet, home: Path, tmp_path: Path) -> None:
    get(replace(toy, classes=("a", "b")), tmp_path / "to", home)
    assert (tmp_path / "to" / "batches.meta.txt").read_text() == "a\nb\n"


class TestTheCommand:
    def test_into_a_folder(self, toy: NamedSet, home: Path, tmp_path: Path) -> None:
        outcome = CliRunner().invoke(
            app, ["data", "get", "toy", "--from", str(home), "--to", str(tmp_path / "to")]
        )
        assert outcome.exit_code == 0, outcome.output
        assert str(tmp_path / "to") in outcome.stdout
        assert contents(tmp_path / "to") == the_six(home)

    def test_into_the_cache(self, toy: NamedSet, url: str, cache: Path) -> None:
        assert CliRunner().invoke(app, ["data", "get", "toy", "--from", url]).exit_code == 0
        assert find(toy).folder == cache / "toy"

    @pytest.mark.parametrize(
        "arguments", [["cifar11"], ["toy"], ["toy", "--from", "/no/such/folder"]]
    )
    def test_bad_input_is_one_line(self, toy: NamedSet, arguments: list[str]) -> None:
        outcome = CliRunner().invoke(app, ["data", "get", *arguments])
        assert isinstance(outcome.exception, DataError | RuntimeError)
        assert outcome.exception.exit_code == 2
        assert "\n" not in str(outcome.exception)
