"""`allstep study data` as the user types it: real runs once, and again with another goal."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep import runlog
from allstep.cli.app import app


def allstep(*words: str) -> str:
    result = CliRunner().invoke(app, ["study", "data", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(600)
def test_real_runs_and_another_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs train on as many samples as they should, and validate on the same."""
    monkeypatch.setattr(sys, "argv", ["allstep", "study", "data"])
    words = ["digits", "--sizes", "200,400,...,1", "--epochs", "3", "--out", str(tmp_path)]
    said = allstep(*words, "data.workers=0")
    found = json.loads((tmp_path / "table.json").read_text())
    assert "4 runs, " in said
    assert [each["samples"] for each in found["sizes"]] == [200, 400, 800, 1294]
    for each in found["sizes"]:
        (run,) = each["runs"]
        assert abs(run["updates"] - 63) <= 7
        record = runlog.read(tmp_path / "runs" / run["name"] / "run.jsonl")
        data = record.start["data"]
        assert (data["train"], data["validation"]) == (each["samples"], 143)
        assert data.get("unused", 0) == 1294 - each["samples"]
        assert record.evals[-1]["accuracy"] == run["test"]
        validations = [line for line in record.evals if line["part"] == "validation"]
        assert len(validations) == 3 and run["validation"] == validations[-1]["accuracy"]
        assert {line["count"] for line in validations} == {143}
    again = allstep(*words, "--goal", "0.1", "data.workers=0")
    assert "runs, " not in again
    assert "An accuracy of 10% is reached with 200 samples." in again
    assert (tmp_path / "study.png").stat().st_size > 10_000
