"""`allstep train` on the command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allstep import runlog
from allstep.cli.train import _request
from allstep.train import RECIPES, read_config
from support.ranks import clean_environment

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # threads that spin for each other starve on a busy machine


def allstep(
    *arguments: str, folder: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "allstep", "train", *arguments],
        cwd=folder,
        env={**clean_environment(), **ONE_THREAD, **(env or {})},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.usefixtures("processes")
def test_a_run(tmp_path: Path) -> None:
    num_workers = 2
    done = allstep("digits", "epochs=4", "--workers", str(num_workers), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    record = runlog.read(folder / "run.jsonl")
    assert record.start["world"]["size"] == num_workers
    assert record.end is not None
    assert record.end["test"]["accuracy"] > 0.9
    assert read_config(str(folder / "config.yaml")).epochs == 4


@pytest.fixture(scope="module")
def finished(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one epoch, whose name looks like a key, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ("--strict", "--workers", "1", "--out", "lr=0.1")
    done = allstep("digits", "epochs=1", "batch_per_worker=40", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "lr=0.1"


def test_the_written_config_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    arguments = ("--workers", "1")
    shutil.copytree(finished, tmp_path / "first")
    again = allstep("first/config.yaml", "--out", "second", *arguments, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    first, second = (
        runlog.read(tmp_path / name / "run.jsonl").evals[-1] for name in ("first", "second")
    )
    assert first["loss"] == second["loss"]


def test_a_run_resumes_with_what_is_asked_for_now(finished: Path, tmp_path: Path) -> None:
    """Its record was lost, and its name looks like a key; `--strict` is kept with it."""
    out = tmp_path / finished.name
    shutil.copytree(finished, out)
    assert read_config(str(out / "config.yaml")).data.strict
    (out / "run.jsonl").unlink()
    done = allstep(
        "--resume", "lr=0.1", "log_every=3", "save.keep=9", "--workers", "1", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    record = runlog.read(out / "run.jsonl")
    config = record.start["config"]
    assert (config["log_every"], config["save"]["keep"], config["data"]["strict"]) == (3, 9, True)
    assert record.start["position"] == record.start["data"]["train"]
    assert record.end is not None


def test_recipes_files_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    (tmp_path / "lr=0.1" / "config.yaml").touch()

    def read(*arguments: str) -> tuple[str, list[str]]:
        request = _request(list(arguments), [], None, None, None, None)
        return request.source, request.overrides

    assert read("digits", "seed=1") == ("digits", ["seed=1"])
    assert read("/a/lr=0.1/config.yaml", "seed=1") == ("/a/lr=0.1/config.yaml", ["seed=1"])
    assert read("seed=1", "lr=0.1/config.yaml") == ("lr=0.1/config.yaml", ["seed=1"])
    assert read("digits", "data.train=/a/list.yaml") == ("digits", ["data.train=/a/list.yaml"])
    assert read("digits", "model.name=x/y:z") == ("digits", ["model.name=x/y:z"])


@pytest.mark.usefixtures("processes")
def test_the_recipes_are_listed(tmp_path: Path) -> None:
    done = allstep("--list", folder=tmp_path)
    assert all(name in done.stdout for name in RECIPES)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["digist"], "no recipe is called 'digist'; did you mean 'digits'?"),
        (["digits", "epoch=1"], "unknown config key 'epoch'; did you mean 'epochs'?"),
        (["digits", "fashion-mnist"], "expected one recipe or config file"),
        (
            ["digits", "--data", "."],
            ": expected train-images-idx3-ubyte or train-images-idx3-ubyte.gz, found nothing",
        ),
        (["digits", "--out", "/proc/nothing"], "cannot be written"),
        (["digits", "--resume", "nothere"], "nothere: holds no run to resume"),
        (["digits", "--resume", "nothere", "--dry-run"], "--overfit and --dry-run precede one"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    done = allstep(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_a_typo_in_an_option_is_corrected(tmp_path: Path) -> None:
    done = allstep("digits", "--worker", "2", folder=tmp_path)
    assert done.returncode == 2
    assert "--workers" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("processes")
def test_a_world_has_the_workers_it_has(tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = allstep("digits", "--workers", "2", folder=tmp_path, env=world)
    assert done.returncode == 2
    assert "--workers 2, but torchrun has started 1" in done.stderr


@pytest.mark.usefixtures("peers")
def test_under_torchrun_it_is_a_worker_and_a_restart_resumes(tmp_path: Path) -> None:
    """Rank 1 of the first start is killed in the second epoch; torchrun starts all ranks again."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    first = '[ $TORCHELASTIC_RESTART_COUNT = 0 ] && export ALLSTEP_FAULTS=kill@rank=1,step=30; "$@"'
    restarts = ["--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.2"]
    train = [sys.executable, "-m", "allstep", "train", "digits", "epochs=2", "--out", "out"]
    done = subprocess.run(
        [torchrun, *restarts, "--no-python", "sh", "-c", first, "sh", *train, "--resume", "auto"],
        cwd=tmp_path,
        env={**clean_environment(), **ONE_THREAD},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "`allstep train --min-workers N` would have continued from memory" in done.stderr
    assert "  resumes    after 1,294 samples" in done.stderr + done.stdout
    start = runlog.read(tmp_path / "out" / "run.jsonl").start
    assert (start["world"]["launcher"], start["world"]["size"]) == ("torchrun", 2)
    assert not os.path.lexists(tmp_path / "runs")
