"""The duties of rank 0 pass to another worker: run record, TensorBoard, display, folder lock."""

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from allstep import runlog
from allstep.errors import ConfigError
from allstep.train.folder import run_lock
from allstep.train.folder.run_lock import LOCK, check_free
from allstep.train.run import duties as module
from allstep.train.run.duties import Duties
from allstep.train.run.worlds.changes import Changes
from allstep.train.run.worlds.generations import Generations
from allstep.train.watch.record_callback import Record
from allstep.train.watch.straggler_report import StragglerReport
from allstep.train.watch.tensorboard import TensorBoard
from allstep.train.watch.terminal import Display
from support.callback_events import opening, progress


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second holder of the lock fail at once."""
    monkeypatch.setattr(run_lock, "TIMEOUT", 0.0)


def kinds(duties: Duties) -> list[type]:
    return [type(each) for each in duties.callbacks.callbacks]


def begin(folder: Path) -> Duties:
    """Return the duties of the rank 0 of a new run."""
    duties = Duties()
    duties.lock(folder)
    duties.open(folder)
    duties.watch_speed()
    duties.callbacks.start(opening(folder))
    return duties


def test_the_next_rank_0_continues_what_the_lost_one_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = begin(tmp_path)
    first.callbacks.progress(progress(640))
    # The kernel does the same for a process that has ended.
    first.close()
    assert not first.are_taken
    assert "allstep" in capsys.readouterr().out

    second = Duties()
    second.take_over(tmp_path, opening(tmp_path, position=640))
    assert second.are_taken
    assert kinds(second) == [Record, TensorBoard, Display, StragglerReport]
    second.callbacks.event("lost rank 0", gap=0.2, hosts=["h1"])
    second.callbacks.progress(progress(1280, num_workers=1))
    second.remind()
    second.close()

    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["note: lost rank 0"] and not shown.err
    record = runlog.read(tmp_path / "run.jsonl")
    assert len(record.starts) == 1
    assert [line["samples"] for line in record.steps] == [640, 1280]
    assert [line["text"] for line in record.events] == ["lost rank 0"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_the_lock_names_the_process_that_has_the_duties(tmp_path: Path) -> None:
    holder = f"is being trained by process {os.getpid()} on {socket.gethostname()}; wait"
    first = begin(tmp_path)
    with pytest.raises(ConfigError, match=holder):
        check_free(tmp_path)
    first.close()
    check_free(tmp_path)

    # What the lost rank 0 has left: the kernel frees its lock, its name stays in the file.
    (tmp_path / LOCK).write_text("process 1 on gone")
    second = Duties()
    second.take_over(tmp_path, opening(tmp_path, position=640))
    with pytest.raises(ConfigError, match=holder):
        check_free(tmp_path)
    second.close()
    assert (tmp_path / LOCK).read_text() == ""


def test_a_rank_0_that_does_not_see_the_folder_reports_it_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [5.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    missing = tmp_path / "run"
    duties = Duties()
    problem = f"the run continues, but is not saved: {missing}: this host has no such folder"

    duties.take_over(missing, opening(missing, position=640))
    assert problem in capsys.readouterr().err
    assert kinds(duties) == [Display, StragglerReport]
    duties.callbacks.event("lost rank 0", gap=0.2)
    assert "note: lost rank 0" in capsys.readouterr().out

    printed = []
    for now[0] in (5.1, 64.9, 65.1, 124.9, 125.2):
        duties.remind()
        printed.append(problem in capsys.readouterr().err)
    assert printed == [False, False, True, False, True]
    assert not missing.exists()

    # Without the duties there is nothing to report, and the next problem is printed at once.
    duties.close()
    now[0] = 200.0
    duties.remind()
    assert not capsys.readouterr().err
    duties.take_over(missing, opening(missing, position=640))
    assert problem in capsys.readouterr().err
    duties.close()


def test_a_folder_that_another_process_trains_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cut-off rank 0 may still hold it: the record must not get lines of two processes."""
    other = begin(tmp_path)
    duties = Duties()
    duties.take_over(tmp_path, opening(tmp_path, position=640))
    assert "is not saved" in capsys.readouterr().err
    assert kinds(duties) == [Display, StragglerReport]
    duties.callbacks.progress(progress(1280))
    duties.close()
    other.close()
    assert runlog.read(tmp_path / "run.jsonl").steps == ()


CHANGE = {"generation": 2, "position": 640, "workers": 2, "lost": 1, "joined": 0}


@pytest.mark.parametrize("was_recorded", [True, False])
def test_a_change_that_the_lost_rank_0_did_not_record_is_recorded(
    tmp_path: Path, was_recorded: bool
) -> None:
    """It was lost between the first step after the change and its record."""
    first = begin(tmp_path)
    # That of an earlier launch of the run, and one of this rank 0 with other times.
    first.callbacks.event("lost rank 1", **{**CHANGE, "position": 320}, gap=0.3)
    if was_recorded:
        first.callbacks.event("lost rank 1", **CHANGE, gap=0.2)
    first.close()

    worker = object.__new__(Generations)
    worker._duties, worker._changes = Duties(), Changes()
    worker._changes.unconfirmed = "lost rank 1 on h0", {**CHANGE, "gap": 0.25}
    worker._duties.take_over(tmp_path, opening(tmp_path, position=640))
    job = SimpleNamespace(out=tmp_path, progress=SimpleNamespace(samples=704))
    worker._report_unrecorded(SimpleNamespace(job=job, callbacks=worker._duties.callbacks))
    worker._duties.close()
    changes = [each for each in runlog.read(tmp_path / "run.jsonl").events if "position" in each]
    assert len(changes) == 2
    assert changes[-1]["gap"] == (0.2 if was_recorded else 0.25)
