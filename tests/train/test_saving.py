"""Saving beside the training: order, copies, keeping, and a disk that is full."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from allstep.train import checkpoint, saving
from allstep.train.checkpoint import Snapshot
from allstep.train.saving import Saved, Saver, outdated


def snapshot(samples: int, value: float = 0.0) -> Snapshot:
    return Snapshot(samples, {"w": torch.full((4,), value)}, {}, {"samples": samples})


def test_what_is_saved_is_what_was_there_when_asked(tmp_path: Path) -> None:
    saver, weights = Saver(tmp_path), torch.zeros(1000)
    for samples in range(1, 4):
        saver.save(Snapshot(samples, {"w": weights}, {"w/m": weights}, {}))
        weights += 1  # the step after
    saver.close()
    found = checkpoint.newest(tmp_path).snapshot
    assert found is not None and found.samples == 3
    assert (found.weights["w"] == 2).all() and (found.optimizer["w/m"] == 2).all()


def test_the_caller_does_not_wait_and_the_newest_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write, begun, told = threading.Event(), threading.Event(), list[Saved]()

    def slowly(folder: Path, snapshot: Snapshot, write: object = checkpoint.write) -> Path:
        begun.set()
        assert may_write.wait(30)
        return write(folder, snapshot)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(saving.checkpoint, "write", slowly)
    saver = Saver(tmp_path, tell=told.append)
    saver.save(snapshot(1))
    assert begun.wait(30)
    for samples in (2, 3, 4):
        saver.save(snapshot(samples))  # would hang here if it waited
    may_write.set()
    saver.close()
    assert [saved.samples for saved in told] == [1, 4]
    assert [int(path.name) for path in checkpoint.written(tmp_path)] == [4, 1]


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for samples in range(1, 8):
        saver = Saver(tmp_path, keep=2)
        saver.best = 3 if samples > 3 else None
        saver.save(snapshot(samples), best=samples == 3)
        saver.close()
    assert [int(path.name) for path in checkpoint.written(tmp_path)] == [7, 6, 3]


def test_outdated() -> None:
    paths = [Path(f"{number:012}") for number in (9, 7, 5, 3)]
    assert outdated(paths, 2, None) == paths[2:]
    assert outdated(paths, 2, 5) == paths[3:]
    assert outdated(paths, 2, 9) == paths[2:]
    assert outdated(paths, 9, None) == []


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Saved] = []
    saver = Saver(tmp_path, tell=told.append)
    with monkeypatch.context() as patch:
        written = threading.Event()
        saver.tell = lambda saved: (told.append(saved), written.set())[0]  # type: ignore[func-returns-value]

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "fsync", full)
        saver.save(snapshot(1))
        assert written.wait(30)
    saver.save(snapshot(2))
    saver.close()
    assert [(saved.samples, saved.path is None) for saved in told] == [(1, True), (2, False)]
    assert told[0].error is not None and told[0].error.errno == errno.ENOSPC
    assert [int(path.name) for path in checkpoint.written(tmp_path)] == [2]
