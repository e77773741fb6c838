"""`allstep bench launch`: each contender really runs once; the turns, the table and the JSON are
tested with quick stand-ins."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.bench import launch
from allstep.bench.launch import LaunchContender, LaunchFailed, contenders, measure_launch
from allstep.cli.app import app

PYTHON = sys.executable
QUICK = [
    LaunchContender("import torch", (PYTHON, "-c", "pass")),
    LaunchContender("torchrun, env://", (PYTHON, "-c", "pass")),
    LaunchContender("allstep run, env://", (PYTHON, "-c", "pass")),
    LaunchContender("mpirun, allstep.init()", ("mpirun",), missing="mpirun is not installed"),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "contenders", lambda: QUICK)


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("contender", contenders()[1:], ids=lambda contender: contender.name)
def test_it_runs(contender: LaunchContender, tmp_path: Path) -> None:
    if contender.missing:
        pytest.skip(contender.missing)
    (tmp_path / contender.script).write_text(launch._SCRIPTS[contender.script])
    assert 0 < launch._time(contender, tmp_path) < 60


@pytest.mark.usefixtures("processes")
@pytest.mark.usefixtures("quick")
def test_turns_are_taken_one_after_the_other() -> None:
    turns: list[str] = []
    result = measure_launch(2, turns.append)
    assert (
        turns == [contender.name for contender in QUICK[:3]] * 3
    )  # the first round is the warm-up
    assert [len(row.seconds) for row in result.rows] == [2, 2, 2]
    assert [missing.name for missing in result.missing] == ["mpirun, allstep.init()"]


@pytest.mark.usefixtures("processes")
@pytest.mark.usefixtures("quick")
def test_json_on_standard_output_is_alone_there(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["bench", "launch", "--repetitions", "1", "--json", "-"])
    document = json.loads(outcome.stdout)
    assert [row["name"] for row in document["rows"]] == [contender.name for contender in QUICK[:3]]
    assert document["rows"][1]["ratio"]["torchrun"] == 1.0
    assert "median" in outcome.stderr
    assert "missing: mpirun, allstep.init() (mpirun is not installed)" in outcome.stderr


@pytest.mark.usefixtures("processes")
@pytest.mark.usefixtures("quick")
def test_json_into_a_file(tmp_path: Path) -> None:
    file = tmp_path / "launch.json"
    outcome = CliRunner().invoke(app, ["bench", "launch", "-r", "1", "--json", str(file)])
    assert "median" in outcome.stdout
    assert json.loads(file.read_text())["benchmark"] == "launch"


def test_a_wrong_folder_is_said_before_measuring(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(
        app, ["bench", "launch", "--json", str(tmp_path / "no" / "launch.json")]
    )
    assert "there is no folder" in str(outcome.exception)


@pytest.mark.usefixtures("processes")
def test_a_peer_that_fails_is_missing_and_ours_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho no MPI today\nexit 3\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(launch, "contenders", lambda: [LaunchContender("mpirun", (str(mpirun),))])
    assert [missing.reason for missing in measure_launch(1).missing] == [
        "it fails here: no MPI today"
    ]
    ours = LaunchContender("allstep run", (PYTHON, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(launch, "contenders", lambda: [ours])
    with pytest.raises(LaunchFailed, match="allstep run ended with status 3"):
        measure_launch(1)
