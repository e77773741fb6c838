"""What a dataset contains, compared with the files themselves."""

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data.inspect.info import Spread, files_of, info
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.plan import Options
from allstep.errors import DataError
from support.image_folders import CLASSES, aged, make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_folder(tmp_path / "photos")
    (folder / "cat" / "007.png").unlink()
    return aged(folder)


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    pack(open_source(str(folder)), str(folder), tmp_path / "packed", Options("x", shard_samples=10))
    return tmp_path / "packed"


def test_of_a_folder(folder: Path) -> None:
    found = info(open_source(str(folder)), "photos")
    files = [
        path for path in folder.rglob("*.*") if path.is_file() and not path.name.startswith(".")
    ]
    assert (found.num_samples, found.num_files, found.nbytes) == (
        23,
        23,
        sum(path.stat().st_size for path in files),
    )
    assert found.classes == (("cat", 7), ("dog", 8), ("eel", 8))
    assert found.images.formats == {"jpeg": 21, "png": 2}
    assert found.images.width == Spread(32, 32, 32)
    assert found.images.height == Spread(24, 27, 31)


def test_of_shards(packed: Path) -> None:
    found = info(open_source(str(packed)), "packed")
    assert (found.num_samples, found.num_files, found.num_classes) == (23, 3, 3)
    assert found.nbytes == sum(path.stat().st_size for path in packed.glob("*.tfrecord"))
    assert dict(found.classes) == {"cat": 7, "dog": 8, "eel": 8}
    assert found.num_unlabelled == 0


def test_files_in_their_order(packed: Path) -> None:
    assert [Path(name).name for name in files_of(open_source(str(packed)))] == [
        f"x-0000{i}-of-00003.tfrecord" for i in range(3)
    ]


class TestTheCommand:
    @pytest.mark.parametrize("verb", ["info", "verify", "index"])
    def test_an_empty_dataset_is_an_error(self, tmp_path: Path, verb: str) -> None:
        tarfile.open(tmp_path / "x.tar", "w").close()
        outcome = CliRunner().invoke(app, ["data", verb, str(tmp_path / "x.tar")])
        assert isinstance(outcome.exception, DataError) and outcome.exception.exit_code == 2
        assert "x.tar: is empty" in str(outcome.exception)

    def test_a_table(self, packed: Path) -> None:
        outcome = CliRunner().invoke(app, ["data", "info", str(packed)])
        assert outcome.exit_code == 0, outcome.output
        for text in (
            "23",
            "7 to 8 samples each",
            "21 jpeg, 2 png",
            "24 to 31, median 27",
            *CLASSES,
            "█" * 30,
        ):
            assert text in outcome.stdout

    def test_json(self, packed: Path, tmp_path: Path) -> None:
        outcome = CliRunner().invoke(app, ["data", "info", str(packed), "--json", "-"])
        document = json.loads(outcome.stdout)
        assert (document["num_samples"], document["classes"][0]) == (23, ["cat", 7])
        CliRunner().invoke(
            app, ["data", "info", str(packed), "--json", str(tmp_path / "info.json")]
        )
        assert json.loads((tmp_path / "info.json").read_text()) == document

    def test_nothing_there(self, tmp_path: Path) -> None:
        outcome = CliRunner().invoke(app, ["data", "info", str(tmp_path / "none")])
        assert getattr(outcome.exception, "exit_code", None) == 2

    def test_no_name_is_not_the_current_folder(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        outcome = CliRunner().invoke(app, ["data", "info", ""])
        assert getattr(outcome.exception, "exit_code", None) == 2
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
