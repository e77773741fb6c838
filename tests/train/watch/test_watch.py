"""Events to callbacks: the record reads back, a callback that fails ends nothing, a full disk loses
no line.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from allstep import runlog
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Evaluated, Progress, Result, TrainingScore
from allstep.train.watch.record_callback import Record
from support.callback_events import progress
from support.scores import classified

SCORE = classified(0.5, 0.9, 360, 0.99)


class Memory(Callback):
    """Callback that keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def progress(self, progress: Progress) -> None:
        self.received.append(progress.samples)

    def event(self, text: str, **figures: Any) -> None:
        self.received.append((text, figures))


class Failing(Callback):
    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def progress(self, progress: Progress) -> None:
        self.calls += 1
        raise self.error

    def event(self, text: str, **figures: Any) -> None:
        raise self.error

    def close(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "calls", "message"),
    [
        (
            ValueError("of its own"),
            1,
            "Failing failed, the run continues: ValueError: of its own; it receives no further events",
        ),
        (
            OSError(errno.ENOSPC, "No space left"),
            3,
            "Failing failed, the run continues: OSError: [Errno 28] No space left",
        ),
    ],
)
def test_a_callback_that_fails_is_reported_once_and_ends_nothing(
    error: Exception, calls: int, message: str
) -> None:
    failing, before, after = Failing(error), Memory(), Memory()
    callbacks = Callbacks([before, failing, after])
    for samples in (1, 2, 3):
        callbacks.progress(progress(samples))
    callbacks.close()
    assert failing.calls == calls
    assert before.received == [1, (message, {}), 2, 3]
    assert after.received == [(message, {}), 1, 2, 3]


def test_every_method_reaches_every_callback(tmp_path: Path) -> None:
    names: list[str] = []

    def noting(name: str) -> Callable[..., None]:
        return lambda self, *values, **figures: names.append(name)

    methods = [name for name in vars(Callback) if not name.startswith("_")]
    noted = type("Noted", (Callback,), {name: noting(name) for name in methods})()
    callbacks = Callbacks([Callback(), noted])
    values = {"saved": (1, tmp_path), "close": ()}
    for name in methods:
        getattr(callbacks, name)(*values.get(name, ("text",)))
    assert names == methods


def test_the_record_reads_back(tmp_path: Path) -> None:
    record = Record(runlog.RunLog(tmp_path / "run.jsonl"))
    record.progress(progress(640, grad_norm=float("inf"), trust={"conv1": 0.1, "fc": float("nan")}))
    record.evaluated(Evaluated(1, 1294, SCORE, SCORE, 2.0, is_best=True, num_bad=2))
    record.saved(1294, tmp_path / "checkpoints" / "000000001294")
    record.event("a line", where=tmp_path)
    record.end(
        Result(
            SCORE,
            SCORE,
            640.0,
            2.0,
            5.0,
            tmp_path,
            1294,
            best=SCORE,
            train=TrainingScore(SCORE, 647, 0.25),
        )
    )
    record.close()
    found = runlog.read(tmp_path / "run.jsonl")
    step = {name: value for name, value in found.steps[0].items() if name not in ("kind", "time")}
    written = asdict(progress(640)) | {"grad_norm": None, "trust": {"conv1": 0.1, "fc": None}}
    written |= written["times"] | written["metrics"]
    assert step == {
        name: value
        for name, value in written.items()
        if name not in ("times", "metrics", "noise_scale", "sent", "received", "version")
    }
    assert [(line["part"], line["samples"], line["top5"]) for line in found.evals] == [
        ("validation", 1294, 0.99),
        ("train", 647, 0.99),
        ("test", 1294, 0.99),
    ]
    assert found.evals[1]["seconds"] == 0.25
    assert found.evals[0]["best"] is True
    assert found.checkpoints[0]["path"] == "000000001294"
    assert [line.get("num_bad") for line in found.events] == [2, None]
    assert found.events[1]["where"] == str(tmp_path)
    assert found.end is not None and found.end["best"]["accuracy"] == 0.9


def test_lines_that_the_disk_did_not_take_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, memory = runlog.RunLog(tmp_path / "run.jsonl"), Memory()
    callbacks = Callbacks([Record(log), memory])
    callbacks.progress(progress(1))
    with monkeypatch.context() as patch:

        def full(**fields: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(log, "step", full)
        callbacks.progress(progress(2))
        callbacks.progress(progress(3))
    callbacks.progress(progress(4))
    callbacks.close()
    found = runlog.read(tmp_path / "run.jsonl")
    assert [line["samples"] for line in found.steps] == [1, 2, 3, 4]
    assert [line["time"] for line in found.steps] == sorted(line["time"] for line in found.steps)
    assert "No space left" in found.events[0]["text"]
    assert [each for each in memory.received if isinstance(each, int)] == [1, 2, 3, 4]


def test_the_sink_in_the_documentation_works(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "training.md"
    code = (
        page.read_text()
        .split("## Callbacks of your own")[1]
        .split("```python\n")[1]
        .split("```")[0]
    )
    names: dict[str, Any] = {}
    exec(code, names)
    callbacks = Callbacks([names["Csv"](tmp_path / "scores.csv")])
    callbacks.progress(progress(640))
    callbacks.evaluated(Evaluated(1, 1000, SCORE, SCORE, 2.0))
    callbacks.close()
    assert (tmp_path / "scores.csv").read_text().split() == ["1,1000,0.5,0.9"]
