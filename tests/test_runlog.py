"""The run record: what is written is read back, whatever happens to the last line."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep import runlog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "run.jsonl"


def write_run(path: Path) -> None:
    with runlog.RunLog(path) as log:
        log.start(version="0", config={"seed": 1})
        log.step(samples=128, loss=2.0, input=[0.1, 0.2])
        log.step(samples=256, loss=1.0, input=[0.1, 0.2])
        log.eval(part="validation", accuracy=0.5)
        log.checkpoint(samples=256)
        log.event("something", figure=3)
        log.end(seconds=1.5)


def test_what_is_written_is_read(path: Path) -> None:
    write_run(path)
    record = runlog.read(path)
    assert record.start["config"] == {"seed": 1}
    assert [step["samples"] for step in record.steps] == [128, 256]
    assert record.evals[0]["accuracy"] == 0.5
    assert record.checkpoints[0]["samples"] == 256
    assert record.events[0]["text"] == "something"
    assert record.end is not None
    assert record.end["seconds"] == 1.5
    assert all(line["time"] > 1e9 for line in runlog.lines(path))


def test_a_run_that_has_not_ended_can_be_read(path: Path) -> None:
    log = runlog.RunLog(path)
    assert runlog.read(path) == runlog.RunRecord()
    assert runlog.read(path).start == {}
    log.start(version="0")
    assert runlog.read(path).start["version"] == "0"
    assert runlog.read(path).end is None
    log.close()


@settings(deadline=None)
@given(cut=st.integers(min_value=0))
def test_a_torn_last_line_is_ignored_and_writing_continues(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "run.jsonl"
    write_run(path)
    content = path.read_bytes()
    cut %= len(content) + 1
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert len(list(runlog.lines(path))) == whole
    with runlog.RunLog(path) as log:
        log.event("resumed")
    found = [line for line in runlog.lines(path) if line.get("text") != "resumed"]
    assert len(found) in (whole, whole + 1)  # a line that lacked only its end is whole again
    assert runlog.read(path).events[-1]["text"] == "resumed"


def test_unknown_kinds_and_foreign_lines_are_ignored(path: Path) -> None:
    write_run(path)
    with path.open("ab") as file:
        file.write(b'{"kind": "dance"}\n[1, 2]\n"text"\n{"no": "kind"}\n\xff\xfe\n\n')
    with runlog.RunLog(path) as log:
        log.event("after")
    assert runlog.read(path).events[-1]["text"] == "after"


def test_only_finite_numbers_are_written(path: Path) -> None:
    with runlog.RunLog(path) as log, pytest.raises(ValueError):
        log.step(loss=float("nan"))
    assert path.read_bytes() == b""


def test_lines_are_json_of_one_line_each(path: Path) -> None:
    with runlog.RunLog(path) as log:
        log.event("two\nlines, ünïcode")
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["text"] == "two\nlines, ünïcode"


@pytest.mark.usefixtures("processes")
def test_needs_the_standard_library_only() -> None:
    code = (
        "import sys, allstep.runlog; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("hours", [-5, 5])
def test_times_never_decrease_when_the_clock_is_set(
    path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    real = time.time
    with runlog.RunLog(path) as log:
        log.start()
        log.step(samples=1)
        monkeypatch.setattr(time, "time", lambda: real() + 3600 * hours)
        log.step(samples=2)
        log.end()
    record = runlog.read(path)
    times = [line["time"] for line in (*record.starts, *record.steps, *record.ends)]
    assert times == sorted(times)
    # No time passes in this test but its own.
    assert times[-1] - times[0] < 600


def test_a_resumed_run_starts_after_what_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(path)
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "time": 1e300}\n{"kind": "step"}\n')
    ended = runlog.read(path).ends[-1]["time"]
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    with runlog.RunLog(path) as log:
        log.start()
    assert runlog.read(path).starts[-1]["time"] >= ended
