"""`allstep landscape` as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.errors import ConfigError
from support.allstep_command import run
from support.saved_runs import save_digits_run


@pytest.mark.usefixtures("processes")
def test_a_landscape_by_two_workers_and_its_report(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_digits_run(tmp_path / f"run{seed}", seed=seed)
    small = ("--points", "3x3", "--samples", "40", "--workers", "2")
    done = run("landscape", "run0", "run1", *small, "--json", "it.json", "--plot", "it.png",
               cwd=tmp_path)  # fmt: skip
    assert done.code == 0, done.err
    assert "evaluations of 40 samples" in done.err and "with 2 workers" in done.err
    around, line = json.loads((tmp_path / "it.json").read_text())
    assert around == json.loads((tmp_path / "run0" / "landscape" / "around.json").read_text())
    assert line["loss"][0] == around["center"]["loss"] == around["loss"][1][1]
    assert f"loss {around['center']['loss']:.4f}" in done.out
    assert "check the center: allstep eval run0 --part train --samples 40" in done.out
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gone"], "there is no such folder"),
        (["run", "--points", "5by5"], "--points: expected 25x25"),
        (["run", "--part", "all"], "--part: expected train, validation or test, found 'all'"),
        (["run", "--which", "first"], "--which: expected last or best"),
        (["run", "--limit", "soon"], "--limit 'soon' is not a time above 0"),
        (["run", "./run"], "are the same run; the line needs two"),
        (["run", "gone"], "gone: there is no such folder"),
        (["run", "--plot", "run"], "--plot run: is a folder"),
    ],
)
def test_bad_arguments_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    save_digits_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["landscape", *arguments]).exception
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert text in str(error) and "\n" not in str(error)
    assert not (tmp_path / "run" / "landscape").exists()
