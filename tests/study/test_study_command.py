"""`allstep study` as the user types it: real runs once, and what it says to bad input."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep import runlog
from allstep.cli.app import app
from allstep.errors import ConfigError


def allstep(*words: str) -> str:
    result = CliRunner().invoke(app, ["study", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("processes")
def test_two_real_runs_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call runs nothing and finds the same; a third asks another question."""
    monkeypatch.setattr(sys, "argv", ["allstep", "study", "batch"])
    words = [
        "batch",
        "digits",
        "--batches",
        "64,256",
        "--remedies",
        "plain",
        "--epochs",
        "1",
        "--goal",
        "0.01",
    ]
    words += ["--out", str(tmp_path), "evaluation.every=1", "data.workers=0"]
    said = allstep(*words)
    assert "2 runs, " in said and "256-plain-seed0: done, test accuracy" in said
    table = (tmp_path / "table.md").read_text()
    found = json.loads((tmp_path / "table.json").read_text())
    for cell in found["cells"]:
        (run,) = cell["runs"]
        record = runlog.read(tmp_path / "runs" / run["name"] / "run.jsonl")
        assert run["test"] == record.ends[0]["test"]["accuracy"]
        config = record.start["config"]
        assert (config["batch"], config["epochs"], config["seed"]) == (cell["batch"], 1, 0)
        assert record.start["world"]["threads"] == [1]
        assert (
            run["reached"]["updates"] == run["updates"] == {64: 21, 256: 6}[cell["batch"]]
        )  # of 1,294 samples
    again = allstep(*words)
    assert "runs, " not in again and table in again
    assert (tmp_path / "table.md").read_text() == table
    with pytest.raises(ConfigError, match=r"goal was 0\.01, now not given"):
        allstep(*[word for word in words if word not in ("--goal", "0.01")])


def test_ctrl_c_writes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens to the processes then, test_runner looks at."""

    def interrupted(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("allstep.study.run", interrupted)
    (tmp_path / "runs").mkdir()
    result = CliRunner().invoke(
        app,
        [
            "study",
            "batch",
            "digits",
            "--remedies",
            "plain",
            "--batches",
            "64,1024",
            "--out",
            str(tmp_path),
        ],
    )
    assert result.exit_code == 130
    assert "interrupted after 0 runs have ended; the same command resumes" in result.output
    assert "| 1024  |     - |" in (tmp_path / "table.md").read_text()


def test_runs_that_were_told_to_stop_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allstep.study.run", lambda *_, **options: {})
    (tmp_path / "runs").mkdir()
    words = [
        "study",
        "batch",
        "digits",
        "--remedies",
        "plain",
        "--batches",
        "64",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 75
    assert "stopped early and saved: 64-plain-seed0; the same command resumes" in result.output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["batch", "digist"], "no recipe is called 'digist'; did you mean 'digits'?"),
        (["batch", "epochs=3"], "expected one recipe or config file, found none"),
        (["batch", "digits", "epoch=1"], "unknown config key 'epoch'"),
        (["batch", "digits", "--remedies", "magic"], "no remedy is called 'magic'"),
        (
            ["batch", "digits", "--remedy", "x:no.key=1", "--remedies", "x"],
            "unknown config key 'no.key'",
        ),
        (
            ["batch", "digits", "--batches", "none"],
            "--batches: expected sizes such as 128,1024,4096, found 'none'",
        ),
        (["batch", "digits", "--remedies", ""], "--remedies: expected some of plain, linear, "),
        (
            ["batch", "digits", "--batches", "64,4096"],
            "a batch of 4096 is larger than the training split, which has 1294",
        ),
        (
            ["batch", "digits", "batch=64"],
            "batch=64: the study sets batch in each run; give --batches",
        ),
        (
            ["batch", "digits", "schedule.warmup=3"],
            "the study sets schedule.warmup in each run; give a remedy of your own",
        ),
        (["batch", "digits", "--batches", "1", "model.norm=batch"], "run 1-plain-seed0: "),
        (
            ["updates", "digits", "schedule.warmup=3"],
            "schedule.warmup=3: the study sets schedule.warmup in each run",
        ),
        (["updates", "digits", "--batches", "0"], "--batches"),
        (["updates", "digits", "--every", "0"], "config key 'evaluation.every'"),
        (["updates", "digits", "--every", "1e-320"], "config key 'evaluation.every'"),
        (["updates", "digits", "--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_told_before_anything_runs(
    tmp_path: Path, words: list[str], complaint: str
) -> None:
    with pytest.raises((ConfigError, RuntimeError)) as caught:
        allstep(*words, "--out", str(tmp_path / "study"))
    assert complaint in str(caught.value)
    assert not (
        tmp_path / "study"
    ).exists()  # a folder would hold the next study to what is wrong with this one


@pytest.mark.usefixtures("processes")
def test_a_sync_study_of_two_workers(tmp_path: Path) -> None:
    """One real run with two workers and a slow one; a mode that needs hosts states why."""
    words = ["sync", "digits", "--modes", "allreduce,elastic:8", "--parties", "2", "--epochs", "1"]
    words += ["--faults", "slow:2@rank=1", "--out", str(tmp_path), "data.workers=0", "log_every=5"]
    said = allstep(*words)
    found = json.loads((tmp_path / "table.json").read_text())
    done = {cell["mode"]: cell for cell in found["cells"] if cell["runs"]}
    assert set(done) >= {"allreduce", "shares=speed"}
    for cell in done.values():
        assert cell["runs"][0]["run"]["test"] > 0.5
        assert cell["runs"][0]["images_per_second"] > 0
    assert "## With `slow:2@rank=1`" in said
    with pytest.raises(ConfigError, match=r"the study sets shares in each run; give --modes"):
        allstep("sync", "digits", "shares=[2,1]")
