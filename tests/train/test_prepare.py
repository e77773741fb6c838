"""Before a run: data found or replaced, damage told, folder made, workers counted. None of it needs torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import allstep.data.sets.known
from allstep.data.sets.named import FILES, NAMED, NamedSet
from allstep.data.sources import idx
from allstep.errors import ConfigError, DataError
from allstep.train import read_config
from allstep.train.folder import make_run_folder
from allstep.train.prepare import check, num_validation, prepare
from allstep.train.workers import choose_num_workers, count_gpus, default_num_workers


@pytest.fixture
def no_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where Fashion-MNIST is nowhere, and its home does not answer."""
    nowhere = NamedSet("fashion-mnist", "Fashion-MNIST", (), "http://127.0.0.1:9/", dict.fromkeys(FILES, ""))
    monkeypatch.setattr(allstep.data.sets.known, "NAMED", {**NAMED, "fashion-mnist": nowhere})
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_fashion")
def test_data_that_is_nowhere_gives_way_to_the_digits() -> None:
    prepared = prepare(words=["epochs=2"])
    assert prepared.config.recipe == prepared.config.data.name == "digits"
    assert prepared.config.epochs == 2
    assert prepared.note is not None
    assert prepared.note.startswith("training on the 8x8 digits that come with allstep: Fashion-MNIST is not in")
    assert "\n" not in prepared.note
    check(prepared)


@pytest.mark.usefixtures("no_fashion")
def test_data_that_was_asked_for_by_name_does_not_give_way(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Fashion-MNIST is not in"):
        prepare(words=["data.name=fashion-mnist"])
    path = tmp_path / "config.yaml"
    path.write_text(read_config().to_yaml())
    with pytest.raises(DataError, match="Fashion-MNIST is not in"):
        prepare(str(path))


def test_a_folder_that_was_given_does_not_give_way(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"expected {FILES[0]}"):
        prepare(folder=tmp_path)


def test_the_folder_is_kept_in_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        shape = (40, 4, 4) if "images" in name else (40,)
        idx.write(tmp_path / name, np.zeros(shape, np.uint8))
    monkeypatch.chdir(tmp_path.parent)
    prepared = prepare("digits", folder=Path(tmp_path.name))
    assert prepared.config.data.folder == tmp_path
    check(prepared)
    (tmp_path / FILES[3]).write_bytes((tmp_path / FILES[3]).read_bytes()[:-7])
    with pytest.raises(DataError, match=f"{FILES[3]}: is truncated: expected 48 bytes, found 41"):
        check(prepared)


def test_validation_samples() -> None:
    config = read_config("digits")
    assert num_validation(config, 60000) == 5000
    assert num_validation(config, 1437) == 143
    assert num_validation(config, 4) == 1
    assert num_validation(read_config("digits", ["data.validation=7"]), 60) == 7
    for wrong in (0, 60):
        with pytest.raises(ConfigError, match=r"'data.validation': expected 1 to 59 of 60 samples"):
            num_validation(read_config("digits", [f"data.validation={wrong}"]), 60)


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "batch", "expected"),
    [
        (0, 2, 128, 2),
        (0, 64, 128, 8),
        (0, 64, 4096, 8),
        (0, 64, 64, 4),
        (0, 64, 63, 3),
        (0, 64, 8, 1),
        (0, 1, 128, 1),
        (4, 64, 128, 4),
        (4, 2, 128, 4),
        (4, 2, 32, 2),
        (0, 6, None, 6),
    ],
)
def test_how_many_workers(num_gpus: int, num_cores: int, batch: int | None, expected: int) -> None:
    assert choose_num_workers(num_gpus, num_cores, batch) == expected


def test_how_many_workers_here() -> None:
    assert default_num_workers(read_config("digits", ["batch=16"])) == 1
    assert 1 <= default_num_workers(read_config("digits", ["batch_per_worker=1"])) <= 8
    assert count_gpus() >= 0


def test_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config("digits").resolved(1)
    folders = [make_run_folder(config, None) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs") and folder.name.startswith("digits-") for folder in folders)
    assert read_config(str(folders[0] / "config.yaml")) == config


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    config = read_config("digits").resolved(1)
    assert make_run_folder(config, tmp_path / "out") == tmp_path / "out"
    make_run_folder(config, tmp_path / "out")  # no run in it so far
    (tmp_path / "out" / "run.jsonl").touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        make_run_folder(config, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        make_run_folder(config, tmp_path / "file")


def test_no_torch_before_the_workers() -> None:
    code = (
        "import sys\nfrom allstep.train.prepare import check, prepare\nimport allstep.train.workers, allstep.train.folder\n"
        "check(prepare('digits'))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
