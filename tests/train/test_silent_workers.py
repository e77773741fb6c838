"""Workers that exit with status 0 without a result: one line, exit status 1."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import allstep.launch
from allstep import runlog
from allstep.cli.app import app
from allstep.errors import AllstepError, UserError
from allstep.launch import RESUBMIT
from allstep.train import read_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exits(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    """Simulate workers that exit at once."""
    monkeypatch.setattr(allstep.launch, "launch", lambda *given, **named: code)


def check_refused(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, arguments)
    error = outcome.exception
    assert isinstance(error, AllstepError), (outcome.output, error)
    assert not isinstance(error, UserError)
    assert error.exit_code == 1
    assert str(error).startswith(
        "the workers exited with status 0 without doing their work: expected "
    )
    return str(error)


@pytest.mark.parametrize("test", [["--dry-run"], ["--overfit", "8"]])
def test_what_comes_before_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, test: list[str]
) -> None:
    exits(monkeypatch)
    assert "the outcome of the test" in check_refused("train", "digits", "--workers", "1", *test)
    assert not list(tmp_path.rglob("config.yaml"))


def test_a_run_and_a_resumed_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exits(monkeypatch)
    asked = ("train", "digits", "--workers", "1", "--out", "run")
    assert "the end of the run in run/run.jsonl" in check_refused(*asked)
    assert not (tmp_path / "run").exists(), (
        "the next try, with the mistake mended, finds no config in its way"
    )
    exits(monkeypatch, RESUBMIT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(read_config("digits").resolved(1).to_yaml())
    (tmp_path / "run" / "run.jsonl").write_text('{"kind": "step", "samples": 5}\n')
    resumed = ("train", "--resume", "run", "--workers", "1")
    assert CliRunner().invoke(app, resumed).exit_code == RESUBMIT
    exits(monkeypatch)
    check_refused(*resumed)
    assert (tmp_path / "run" / "run.jsonl").exists()


def test_a_run_that_has_ended_is_a_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def launched(*given: Any, **named: Any) -> int:
        log = runlog.RunLog(tmp_path / "run" / "run.jsonl")
        log.end(reason="", samples=64, test={"accuracy": 0.9})
        log.close()
        return 0

    monkeypatch.setattr(allstep.launch, "launch", launched)
    outcome = CliRunner().invoke(app, ["train", "digits", "--workers", "1", "--out", "run"])
    assert outcome.exit_code == 0, outcome.exception


def test_an_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exits(monkeypatch)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(read_config("digits").resolved(1).to_yaml())
    assert "a score" in check_refused("eval", "run", "--workers", "2")

    def launched(command: list[str], num_workers: int, env: dict[str, str]) -> int:
        Path(env["ALLSTEP_EVAL_DONE"]).touch()
        return 0

    monkeypatch.setattr(allstep.launch, "launch", launched)
    assert CliRunner().invoke(app, ["eval", "run", "--workers", "2"]).exit_code == 0


def test_a_landscape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exits(monkeypatch)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(read_config("digits").resolved(1).to_yaml())
    assert "a landscape" in check_refused("landscape", "run", "--workers", "2")


def test_a_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    exits(monkeypatch)
    assert "their answer" in check_refused("verify", "digits", "--workers", "1,2")
