"""Named datasets: searched in the right order, and checked."""

import gzip
import hashlib
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from allstep.data import NAMED, Loader, NamedSet, find, load, named_set
from allstep.data.sets.load import FILES, cache_folder
from allstep.data.sources import idx
from allstep.errors import ConfigError, DataError
from support.array_sources import Arrays


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_set(folder: Path, suffix: str = ".gz", n: int = 6) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        array = np.arange(n * 16).reshape(n, 4, 4) if "images" in name else np.arange(n) % 3
        idx.write(folder / f"{name}{suffix}", array.astype(np.uint8))
    return folder


def checksums(folder: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(gzip.decompress((folder / f"{name}.gz").read_bytes())).hexdigest()
        for name in FILES
    }


class Quiet(SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012  (one server per test, emptied by its fixture)

    def log_message(self, *args: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[NamedSet]:
    """A set whose home is a server on this machine."""
    home = make_set(tmp_path / "home")
    Quiet.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(home))) as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        yield NamedSet("toy", "Toy", (tmp_path / "system",), url, checksums(home))
        server.shutdown()


def test_the_order_of_places(remote: NamedSet, tmp_path: Path, cache: Path) -> None:
    assert find(remote).folder == cache / "toy"  # downloaded
    make_set(tmp_path / "system")
    assert find(remote).folder == cache / "toy"
    shutil.rmtree(cache)
    assert find(remote).folder == tmp_path / "system"
    mine = make_set(tmp_path / "mine", suffix="")
    assert find(remote, mine).folder == mine
    assert len(Quiet.asked) == 4


def test_a_download_is_used_the_next_time(remote: NamedSet, tmp_path: Path) -> None:
    assert len(load(find(remote)).train) == 6
    find(replace(remote, home="http://127.0.0.1:9/"))


def test_a_cache_with_some_files_is_completed(
    remote: NamedSet, tmp_path: Path, cache: Path
) -> None:
    (cache / "toy").mkdir(parents=True)
    shutil.copy(tmp_path / "home" / f"{FILES[0]}.gz", cache / "toy")
    find(remote)
    assert len(Quiet.asked) == 3


@pytest.mark.usefixtures("processes")
def test_several_workers_download_once(remote: NamedSet) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            find(remote)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert errors == []
    assert len(Quiet.asked) == 4


def test_a_home_with_other_content_is_refused(remote: NamedSet, cache: Path) -> None:
    wrong = replace(remote, sha256={**remote.sha256, FILES[1]: "0" * 64})
    with pytest.raises(DataError, match=f"{FILES[1]}.gz: wrong content"):
        find(wrong)
    assert not (cache / "toy" / f"{FILES[1]}.gz").exists()


def test_found_nowhere(tmp_path: Path) -> None:
    nowhere = NamedSet(
        "toy",
        "Toy",
        (tmp_path / "system",),
        "http://127.0.0.1:9/",
        dict.fromkeys(FILES, ""),
        "try this",
    )
    with pytest.raises(
        DataError, match=r"Toy is not in .*toy, .*system, and .*refused.*try this, or give --data"
    ):
        find(nowhere)
    with pytest.raises(DataError, match=r"Toy is not in .*system"):
        find(replace(nowhere, home=None))


def test_unknown_names_are_corrected() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion-mnist'"):
        named_set("fashion-mnst")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("ALLSTEP_CACHE")
    assert cache_folder().name == "allstep"


def test_the_digits_come_along() -> None:
    images = load(find(NAMED["digits"]))
    assert (len(images.train), len(images.test)) == (1437, 360)
    assert images.num_classes == 10
    assert images.image_shape == (1, 8, 8)
    assert images.train.images.max() == 16
    assert sum(path.stat().st_size for path in NAMED["digits"].folders[0].iterdir()) < 70_000


def test_debians_files_have_the_contents_of_the_home() -> None:
    folder = NAMED["fashion-mnist"].folders[0]
    if not folder.exists():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    assert checksums(folder) == NAMED["fashion-mnist"].sha256


@pytest.mark.parametrize("dtype", ["u1", "i2", "f4"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_is_found_can_be_loaded(tmp_path: Path, suffix: str, dtype: str) -> None:
    folder = make_set(tmp_path / "mine", suffix)
    images = np.arange(6 * 16).reshape(6, 4, 4).astype(dtype)
    idx.write(folder / f"{FILES[0]}{suffix}", images)
    train = load(find(NAMED["digits"], folder)).train
    assert train.images.dtype.isnative
    batch = next(Loader(Arrays(train.images, train.labels), batch=6, seed=None).batches())
    np.testing.assert_array_equal(batch.data.numpy(), images)


class TestAFolderOfTheUsers:
    """The error is reported with the name of the first wrong file."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return make_set(tmp_path / "mine")

    def complaint(self, folder: Path) -> str:
        with pytest.raises(DataError) as caught:
            load(find(NAMED["fashion-mnist"], folder))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def test_none(self, tmp_path: Path) -> None:
        assert "no such folder" in self.complaint(tmp_path / "none")

    def test_a_file(self, folder: Path) -> None:
        assert "is not a folder" in self.complaint(folder / f"{FILES[0]}.gz")

    def test_empty(self, tmp_path: Path) -> None:
        assert f"expected {FILES[0]} or {FILES[0]}.gz, found nothing" in self.complaint(tmp_path)

    def test_the_first_missing(self, folder: Path) -> None:
        (folder / f"{FILES[3]}.gz").unlink()
        (folder / f"{FILES[2]}.gz").rename(folder / "a.png")
        assert f"expected {FILES[2]} or {FILES[2]}.gz, found a.png, train-images" in self.complaint(
            folder
        )

    def test_the_wrong_kind(self, folder: Path) -> None:
        (folder / f"{FILES[1]}.gz").write_bytes(gzip.compress(b"not an idx file"))
        assert f"{FILES[1]}.gz: is not an idx file" in self.complaint(folder)

    def test_truncated(self, folder: Path) -> None:
        path = folder / f"{FILES[2]}.gz"
        path.write_bytes(path.read_bytes()[:-20])
        assert f"{FILES[2]}.gz: is truncated: expected 112 unpacked bytes, found" in self.complaint(
            folder
        )

    def test_images_of_another_size(self, folder: Path) -> None:
        idx.write(folder / f"{FILES[2]}.gz", np.zeros((6, 5, 4), np.uint8))
        assert f"{FILES[2]}.gz: expected images of (4, 4)" in self.complaint(folder)

    def test_labels_out_of_range(self, folder: Path) -> None:
        idx.write(folder / f"{FILES[3]}.gz", np.full(6, 9, np.uint8))
        assert f"{FILES[3]}.gz: expected labels 0 to 2, found 9" in self.complaint(folder)
        idx.write(folder / f"{FILES[1]}.gz", np.full(6, -1, np.int8))
        assert f"{FILES[1]}.gz: expected labels that are integers" in self.complaint(folder)

    def test_no_images(self, folder: Path) -> None:
        idx.write(folder / f"{FILES[0]}.gz", np.zeros((0, 4, 4), np.uint8))
        idx.write(folder / f"{FILES[1]}.gz", np.zeros(0, np.uint8))
        assert f"{FILES[0]}.gz: has no images" in self.complaint(folder)
