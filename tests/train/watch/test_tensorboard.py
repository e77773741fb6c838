"""TensorBoard events, read back by TensorBoard's own reader; a full disk; torch and TensorFlow are
not imported.
"""

import errno
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from allstep.train.watch import tensorboard
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Evaluated, Result, TrainingScore
from allstep.train.watch.tensorboard import TensorBoard
from support.callback_events import opening, progress
from support.scores import classified


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that reads the figures of a run folder, by tag and samples."""
    # As in an installation without TensorFlow, because importing it takes longer than these tests.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(out: Path) -> dict[str, dict[int, float]]:
        found = EventAccumulator(str(out / "tensorboard")).Reload()
        return {
            tag: {event.step: event.value for event in found.Scalars(tag)}
            for tag in found.Tags()["scalars"]
        }

    return read


def test_tensorboard_reads_all_figures(tmp_path: Path, read: Any) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.start(opening(tmp_path))
    board.progress(progress(640, grad_norm=2.0, noise_scale=300.0, trust={"conv1": 0.25}))
    board.evaluated(
        Evaluated(
            1, 1000, classified(0.6, 0.8, 500), classified(0.5, 0.9, 100, 0.99), 2.0, num_bad=3
        )
    )
    train = TrainingScore(classified(0.3, 0.8, 100, 0.97), 1000, 0.1)
    test, validation = classified(0.4, 0.7, 100, 0.98), classified(0.5, 0.9, 100)
    board.end(Result(test, validation, 500.0, 2.0, 5.0, tmp_path, samples=1000, train=train))
    board.close()
    found = read(tmp_path)
    at_640 = {
        "loss/train": 100.0 / 640,
        "accuracy/train": 0.5,
        "rate": 0.1,
        "batch": 64.0,
        "images_per_second": 640.0,
    }
    at_640 |= {
        "grad_norm": 2.0,
        "noise_scale": 300.0,
        "trust/conv1": 0.25,
        "memory/0": 1000.0,
        "memory/1": 2000.0,
    }
    shares = {"input": 0.25, "compute": 0.5, "wait": 0.0, "update": 0.25}
    at_640 |= {f"{phase}/{rank}": share for phase, share in shares.items() for rank in (0, 1)}
    at_1000 = {
        "loss/validation": 0.5,
        "accuracy/validation": 0.9,
        "top5/validation": 0.99,
        "num_bad": 3.0,
    }
    at_1000 |= {
        "loss/test": 0.4,
        "accuracy/test": 0.7,
        "top5/test": 0.98,
        "seconds_per_epoch": 1000 / 640,
    }
    at_1000 |= {"loss/train-sample": 0.3, "accuracy/train-sample": 0.8, "top5/train-sample": 0.97}
    figures = [(640, at_640), (1000, at_1000)]
    expected = {
        tag: {samples: value} for samples, by_tag in figures for tag, value in by_tag.items()
    }
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values), tag


@pytest.mark.parametrize("how", ["start", "take_over"])
def test_a_resumed_run_discards_what_came_after_its_checkpoint(
    how: str, tmp_path: Path, read: Any
) -> None:
    """Also the next rank 0 of an elastic run: the lost one has written steps that are repeated."""
    for position, sent in [(0, (100, 200, 300, 400)), (200, (350, 450))]:
        board = TensorBoard(tmp_path / "tensorboard")
        getattr(board, how if position else "start")(opening(tmp_path, position=position))
        for samples in sent:
            board.progress(progress(samples))
        board.close()
    assert len(os.listdir(tmp_path / "tensorboard")) == 2
    assert list(read(tmp_path)["loss/train"]) == [100, 200, 350, 450]


def test_of_many_workers_there_are_mean_and_most(tmp_path: Path, read: Any) -> None:
    board = TensorBoard(tmp_path / "tensorboard")
    board.start(opening(tmp_path))
    board.progress(progress(640, num_workers=17))
    board.close()
    found = read(tmp_path)
    assert (found["memory/mean"], found["memory/most"]) == ({640: 9000.0}, {640: 17000.0})
    assert found["wait/most"] == {640: 0.0}
    assert "memory/0" not in found


class Recorder(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, text: str, **figures: Any) -> None:
        self.texts.append(text)


def test_a_full_disk_is_reported_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(data: bytes) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorboard, "frame", full)
    board, recorder = TensorBoard(tmp_path / "tensorboard"), Recorder()
    callbacks = Callbacks([board, recorder])
    callbacks.start(opening(tmp_path))
    samples = 0
    # The thread fails sooner or later; the time limit of the tests ends a hang.
    while not recorder.texts:
        samples += 1
        callbacks.progress(progress(samples))
    # More events than the queue holds.
    for further in range(20_000):
        callbacks.progress(progress(samples + further))
    callbacks.close()
    assert recorder.texts == [
        "TensorBoard failed, the run continues: OSError: [Errno 28] No space left on device"
    ]


def test_a_board_that_was_never_started_closes(tmp_path: Path) -> None:
    TensorBoard(tmp_path / "tensorboard").close()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("processes")
def test_neither_torch_nor_tensorflow_is_imported() -> None:
    code = (
        "import sys, allstep.train.watch.tensorboard, tensorboard.compat.proto.event_pb2; "
        "print({'torch', 'tensorflow'} & sys.modules.keys())"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
