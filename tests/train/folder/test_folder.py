"""Run folders: existing files are never lost, two runs never share a folder, and each error is one
line.
"""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import allstep
from allstep.errors import ConfigError
from allstep.files.atomic import create_file
from allstep.train import read_config
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.folder import run_lock as holding
from allstep.train.folder.claim import (
    Claimed,
    abandon,
    as_begun,
    claim_folder,
    expect_run,
    holds_run,
)
from allstep.train.folder.run_lock import check_free, hold
from allstep.train.run.duties import Duties
from allstep.train.run.train_request import TrainRequest
from allstep.train.run.worker import work

ENDED = (
    '{"kind": "end", "time": 2, "samples": 64, "test": {"loss": 0.1, "accuracy": 0.9, "count":'
    " 64}}\n"
)


def config(*overrides: str) -> ResolvedConfig:
    return read_config("digits", overrides).resolved(1)


def begun(
    folder: Path,
    *,
    record: str = '{"kind": "start"}\n',
    checkpoints: tuple[int, ...] = (),
    text: str = "",
) -> Path:
    """Make a folder with a run in it."""
    folder.mkdir(exist_ok=True)
    if record:
        (folder / "run.jsonl").write_text(record)
    for samples in checkpoints:
        (folder / "checkpoints" / f"{samples:012}").mkdir(parents=True)
    (folder / "config.yaml").write_text(text or config().to_yaml())
    return folder


def test_a_config_that_the_user_wrote_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# my notes\nepochs: 3\n")
    with pytest.raises(
        ConfigError,
        match=r"config.yaml: exists already with other values: .*; and \d+ more; move it",
    ):
        claim_folder(config(), tmp_path)
    assert file.read_text() == "# my notes\nepochs: 3\n"
    file.write_text("# my notes\n" + config().to_yaml())
    assert claim_folder(config(), tmp_path) == Claimed(tmp_path)
    assert file.read_text().startswith("# my notes\n")


def test_checkpoints_alone_are_a_run(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", record="", checkpoints=(1000,))
    before = (folder / "config.yaml").read_text()
    with pytest.raises(ConfigError, match="already holds a run"):
        claim_folder(config("seed=5"), folder)
    assert (folder / "config.yaml").read_text() == before
    assert claim_folder(config(), folder, resume=True) == Claimed(folder, resumes=True)
    with pytest.raises(
        ConfigError, match="another config: seed was 0, is 5 now; resume it unchanged"
    ):
        claim_folder(config("seed=5"), folder, resume=True)


@pytest.mark.parametrize("more", ["", '{"kind": "event", "text": "slow"}\n{"kind": "st'])
def test_a_start_that_was_killed_before_its_first_step_begins_again(
    tmp_path: Path, more: str
) -> None:
    """The same command starts it; with --resume auto it says that there is no checkpoint."""
    folder = begun(tmp_path / "run", record='{"kind": "start"}\n' + more)
    assert claim_folder(config(), folder) == Claimed(folder)
    assert claim_folder(config(), folder, resume=True) == Claimed(folder, resumes=True)
    with pytest.raises(ConfigError, match="exists already with other values: seed was 0, is 5"):
        claim_folder(config("seed=5"), folder)


@pytest.mark.parametrize("line", ['{"kind": "step"}\n', '{"kind": "eval"}\n', "damaged\n"])
def test_a_run_that_recorded_a_step_is_not_begun_again(tmp_path: Path, line: str) -> None:
    start = "" if line == "damaged\n" else '{"kind": "start"}\n'
    folder = begun(tmp_path / "run", record=start + line)
    with pytest.raises(ConfigError, match="already holds a run"):
        claim_folder(config(), folder)


def test_a_run_that_has_ended(tmp_path: Path) -> None:
    claimed = claim_folder(config(), begun(tmp_path, record=ENDED), resume=True)
    assert claimed.has_ended
    assert "this run has ended" in claimed.ended_message()


@pytest.mark.parametrize(
    "end",
    [
        {},
        {"samples": {}},
        {"samples": "64", "why": []},
        {"samples": True, "test": {}},
        {"samples": 1, "test": 3},
    ],
)
def test_an_end_without_a_score_is_none(tmp_path: Path, end: dict[str, Any]) -> None:
    folder = begun(tmp_path, record=json.dumps({"kind": "end", **end}) + "\n")
    assert claim_folder(config(), folder, resume=True) == Claimed(folder, resumes=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "its config.yaml is missing; restore it"),
        ("", "expected keys and values, found NoneType"),
        ("seed: [1,\n", "config.yaml: is not YAML"),
        ("a: b: c", "config.yaml: is not YAML"),
    ],
)
def test_a_damaged_config(tmp_path: Path, text: str | None, complaint: str) -> None:
    begun(tmp_path)
    if text is None:
        (tmp_path / "config.yaml").unlink()
    else:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        claim_folder(config(), tmp_path, resume=True)


def test_changes_that_are_allowed_are_overrides(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    asked = config(
        "log_every=3",
        "save.keep=9",
        "save.seconds=null",
        "save.epochs=0.5",
        f"data.folder={tmp_path}/a=b c",
    )
    claimed = claim_folder(asked, folder, resume=True)
    assert len(claimed.overrides) == 5
    assert read_config(str(folder / "config.yaml"), claimed.overrides).resolved(1) == asked
    assert claim_folder(config(), folder, resume=True).overrides == ()


@pytest.mark.parametrize("begun_with", ["bfloat16", "float32", "auto"])
def test_auto_means_the_precision_that_a_run_was_begun_with(
    tmp_path: Path, begun_with: str
) -> None:
    """Recipes of earlier versions had a fixed precision; the same command must resume the run."""
    folder = begun(tmp_path / "run", text=config(f"precision={begun_with}").to_yaml())
    assert claim_folder(config(), folder, resume=True) == Claimed(folder, resumes=True)
    assert as_begun(config(), folder).precision == begun_with
    with pytest.raises(ConfigError, match=f"precision was {begun_with}, is float64 now"):
        claim_folder(config("precision=float64"), folder, resume=True)
    (folder / "config.yaml").write_text("precision: double\n")
    with pytest.raises(ConfigError, match=r"config key 'precision': expected .*, found 'double'"):
        as_begun(config(), folder)


def test_of_two_configs_that_come_at_once_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert create_file(tmp_path / "config.yaml", b"first")
    assert not create_file(tmp_path / "config.yaml", b"second")
    assert (tmp_path / "config.yaml").read_text() == "first"

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    assert create_file(tmp_path / "other.yaml", b"third")
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "other.yaml"]


def test_resuming_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nothere: holds no run to resume.*--resume auto would start one"
    ):
        expect_run(tmp_path / "nothere")
    expect_run(begun(tmp_path / "run"))


def test_a_claim_of_which_no_run_came_is_taken_back(tmp_path: Path) -> None:
    claimed = claim_folder(config(), tmp_path / "out")
    check_free(claimed.path)
    # As if a worker had opened the record and failed.
    (claimed.path / "run.jsonl").touch()
    assert not holds_run(claimed.path)
    abandon(claimed)
    assert os.listdir(tmp_path) == []
    kept = claim_folder(config(), begun(tmp_path / "run"), resume=True)
    abandon(kept)
    assert sorted(os.listdir(tmp_path / "run")) == ["config.yaml", "run.jsonl"]


def test_one_process_holds_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "TIMEOUT", 0.0)
    with hold(tmp_path):
        with pytest.raises(
            ConfigError, match=rf"is being trained by process {os.getpid()} on .*; wait for its end"
        ):
            check_free(tmp_path)
        # A failed check leaves the lock file unchanged.
        with pytest.raises(ConfigError, match="is being trained by process"):
            check_free(tmp_path)
    check_free(tmp_path)


@pytest.mark.usefixtures("processes")
def test_a_holder_that_is_killed_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from pathlib import Path; from allstep.train.folder.run_lock import hold\n"
        "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        monkeypatch.setattr(holding, "TIMEOUT", 0.0)
        with pytest.raises(ConfigError, match=f"by process {process.pid} on"):
            check_free(tmp_path)
        # The killed process may take a moment to end.
        monkeypatch.undo()
        process.send_signal(signal.SIGKILL)
        check_free(tmp_path)


def test_a_file_system_without_locks_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    check_free(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Use folders in place of files, because root may write to read-only files."""
    for name in ("run.lock", "run.jsonl"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"run\.lock: cannot be written: Is a directory"):
        check_free(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.jsonl: cannot be written: Is a directory"):
        Duties().open(tmp_path)


def try_to_work(asked: TrainRequest) -> None:
    holding.TIMEOUT = 0.0
    try:
        work(asked)
    except allstep.UserError as error:
        print(f"allstep: {error}")
        raise SystemExit(error.exit_code) from None


def test_a_folder_that_is_being_trained_in_ends_all_ranks_alike(ranks: Any, tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    asked = TrainRequest(str(folder / "config.yaml"), out=folder, resume=True)
    with hold(folder):
        outcomes = ranks.outcomes(2, try_to_work, asked)
    assert [outcome.exit_code for outcome in outcomes] == [2, 2]
    assert f"is being trained by process {os.getpid()} on" in outcomes[0].output
    assert outcomes[1].output == ""
    outcomes = ranks.outcomes(
        1,
        try_to_work,
        TrainRequest("digits", out=tmp_path / "nothere", resume=True, must_exist=True),
    )
    assert "nothere: holds no run to resume" in outcomes[0].output
    assert not (tmp_path / "nothere").exists()


def test_a_run_among_the_classes_of_its_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder there would be one more class, for the next run and when it is resumed."""
    data = tmp_path / "photos"
    (data / "cats").mkdir(parents=True)
    config = read_config("digits", [f"data.train={data}"])
    for inside in (data, data / "run", data / "cats" / "run"):
        with pytest.raises(
            ConfigError,
            match=r"run folder .* is inside data\.train=.*choose another --out",
        ):
            claim_folder(config, inside)
        assert sorted(path.name for path in data.rglob("*")) == ["cats"]
    monkeypatch.chdir(data)
    with pytest.raises(ConfigError, match="run folder runs is inside data"):
        claim_folder(config, None)
    (data / "train-00000-of-00001.tfrecord").touch()
    # Shards are not classes.
    assert claim_folder(config, data / "run").path == data / "run"


def test_checkpoints_none_of_which_is_whole_are_not_trained_over(ranks: Any) -> None:
    outcomes = ranks.outcomes(1, resumed_with_damage)
    assert "DataError: out: no checkpoint is complete: " in outcomes[0].output
    assert "move out/checkpoints away to start the run from the beginning" in outcomes[0].output


def resumed_with_damage() -> None:
    out = Path("out")
    (out / "checkpoints" / "000000000064").mkdir(parents=True)
    (out / "config.yaml").write_text(read_config("digits").to_yaml())
    try:
        work(TrainRequest("digits", out=out, resume=True))
    finally:
        assert [path.name for path in (out / "checkpoints").iterdir()] == ["000000000064"]


def test_a_run_that_has_ended_needs_no_data_under_a_launcher_either(
    tmp_path: Path, ranks: Any
) -> None:
    """This holds also if the batch would have to be derived from the data."""
    file, out = tmp_path / "mine.yaml", tmp_path / "out"
    file.write_text(f"data: {{train: {tmp_path / 'gone'}}}\n")
    claim_folder(read_config(str(file), ["batch=8"]).resolved(2), out)
    asked = TrainRequest(str(file), out=out, resume=True)
    (out / "run.jsonl").write_text('{"kind": "start", "time": 1}\n')
    outcomes = ranks.outcomes(1, work, asked)
    assert outcomes[0].exit_code != 0 and "gone: no such file or folder" in outcomes[0].output
    (out / "run.jsonl").write_text('{"kind": "start", "time": 1}\n' + ENDED)
    outcomes = ranks.outcomes(2, work, asked)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert "this run has ended" in outcomes[0].output


@pytest.mark.usefixtures("processes")
def test_a_run_that_has_ended_needs_no_data(tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim_folder(read_config("digits", [f"data.train={tmp_path / 'gone'}"]), out)
    command = [sys.executable, "-m", "allstep", "train", "--resume", str(out), "--workers", "1"]
    (out / "run.jsonl").write_text('{"kind": "start", "time": 1}\n')
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "gone: no such file or folder" in done.stderr) == (
        2,
        True,
    ), done.stderr
    (out / "run.jsonl").write_text('{"kind": "start", "time": 1}\n' + ENDED)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "this run has ended" in done.stdout) == (0, True), done.stderr
