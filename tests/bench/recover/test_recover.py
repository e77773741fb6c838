"""`allstep bench recover`: it really kills workers, once each; figures and outputs are checked."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from allstep.bench.recover import measure
from allstep.bench.recover.live_run import RecoverFailed
from allstep.bench.recover.measure import contenders, formers, parse_parts
from allstep.bench.recover.notes import Note, Notebook, read_notes
from allstep.bench.recover.result import (
    ALLSTEP,
    TORCHFT,
    TORCHFT_FAST,
    TORCHRUN,
    RecoverResult,
    RecoverRow,
    Recovery,
)
from allstep.cli.app import app
from allstep.errors import ConfigError
from conftest import SOAK


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)
@pytest.mark.timeout(900 if SOAK else 400)
def test_the_smallest_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One kill each, without torchrun, 2 GB and the world of 8."""
    few = contenders() if SOAK else contenders()[:1]
    monkeypatch.setattr(measure, "contenders", lambda *_: few)
    monkeypatch.setattr(measure, "formers", lambda *_: formers((3,)))
    file = tmp_path / "recover.json"
    options = ["--part", "kill,form", "-r", "1", "--json", str(file)]
    outcome = CliRunner().invoke(app, ["bench", "recover", *options])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(file.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    absent = {each["name"] for each in document["missing"]}
    ours = rows[ALLSTEP]
    assert 0 < ours["parts"]["noticed"] < ours["median"] < 60
    assert not SOAK or (TORCHRUN in rows and TORCHRUN not in absent)
    assert "torchft" in absent
    assert 0 < rows["3 -> 2"]["median"] < 20
    assert 0 < rows["3 -> 2, new memory"]["median"] < 20
    assert "seconds without a finished step" in outcome.stdout


def test_parts_and_ratios() -> None:
    ours = RecoverRow(ALLSTEP, [Recovery(0.1, 0.2, 0.4), Recovery(0.1, 0.3, 0.6)])
    theirs = RecoverRow(TORCHRUN, [Recovery(2.0, 3.0, 5.0)])
    result = RecoverResult([ours, theirs], [], [])
    assert ours.parts == pytest.approx({"noticed": 0.1, "formed": 0.15, "first step": 0.25})
    assert result.ratio(theirs) == pytest.approx(10.0)
    assert sum(ours.parts.values()) == pytest.approx(0.5)


def test_parts_of_the_command() -> None:
    assert parse_parts("join, kill,join") == ["join", "kill"]
    with pytest.raises(ConfigError, match=r"--part 'jion': expected one or more of kill, form"):
        parse_parts("kill,jion")


def test_a_peer_that_does_not_recover_is_listed() -> None:
    found = {TORCHRUN: [RecoverFailed("torchrun did not recover (120 s):\nmore")]}
    rows, (missing,) = measure._rows(found)
    assert rows == []
    assert missing.reason == "1 of 1 runs: torchrun did not recover (120 s):"


def test_torchft_is_compared_if_a_python_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    monkeypatch.delenv("ALLSTEP_TORCHFT_PYTHON", raising=False)
    assert {TORCHFT, TORCHFT_FAST}.isdisjoint(each.name for each in contenders())
    monkeypatch.setenv("ALLSTEP_TORCHFT_PYTHON", "/other/bin/python")
    theirs = {each.name: each for each in contenders() if "torchft" in each.name}
    assert list(theirs) == [TORCHFT, TORCHFT_FAST]
    assert theirs[TORCHFT].command[0] == "/other/bin/python" and theirs[TORCHFT].is_peer
    assert theirs[TORCHFT_FAST].command[-2:] == ("--heartbeat_timeout_ms", "1000")


def test_notes_of_a_killed_worker(tmp_path: Path) -> None:
    """A line may be incomplete."""
    notes = Notebook(tmp_path)
    notes.write("step", 3, at=1.5)
    (file,) = tmp_path.glob("*.notes")
    with file.open("a") as more:
        more.write('["step", 2.')
    (found,) = read_notes(tmp_path).values()
    assert found == [Note("step", 1.5, 3)]
