"""Checkpoints of an elastic run when another worker becomes rank 0, without a network or a model.

The lost rank 0 may have been asked for a checkpoint that it did not write.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from allstep.errors import AllstepError
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.run import checkpoints as module
from allstep.train.run.checkpoints import Checkpoints
from allstep.train.watch.callback import Callback


class Heard(Callback):
    def __init__(self) -> None:
        self.saved_at: list[int] = []

    def saved(self, samples: int, path: Path) -> None:
        self.saved_at.append(samples)


def make_job(out: Path, rank: int) -> Any:
    return SimpleNamespace(
        out=out,
        world=SimpleNamespace(rank=rank),
        trainer=SimpleNamespace(
            model=nn.Linear(1, 1),
            optimizer=SimpleNamespace(state_is_per_rank=False, gather_state=lambda: None),
        ),
        config=SimpleNamespace(save=SimpleNamespace(keep=3, seconds=None)),
        progress=SimpleNamespace(samples=0, owes=None, best=None, best_samples=None),
    )


@contextlib.contextmanager
def opened(job: Any, heard: Heard) -> Iterator[Checkpoints]:
    stopping: Any = SimpleNamespace(note_cost=lambda *_: None)
    made = Checkpoints(job, heard, stopping)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def _capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the snapshot of a job one of its number of samples."""

    def capture(job: Any) -> Snapshot:
        samples = job.progress.samples
        return Snapshot(samples, {"w": torch.full((2,), float(samples))}, {}, {"samples": samples})

    monkeypatch.setattr(module, "capture", capture)


def numbers(out: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.written(out / "checkpoints")]


@pytest.mark.parametrize("is_written", [False, True])
def test_the_next_rank_0_replaces_a_checkpoint_that_the_lost_one_did_not_write(
    is_written: bool, tmp_path: Path
) -> None:
    lost, job, heard = make_job(tmp_path, 0), make_job(tmp_path, 1), Heard()
    with opened(job, heard) as mine:
        job.progress.samples = lost.progress.samples = 1000
        # All ranks request it, only rank 0 writes.
        mine.save()
        assert numbers(tmp_path) == []
        if is_written:
            with opened(lost, Heard()) as theirs:
                theirs.save()
        job.progress.samples, job.world = 1200, SimpleNamespace(rank=0)
        mine.enter()
        mine.close()
        assert numbers(tmp_path) == ([1000] if is_written else [1200])
        assert heard.saved_at == ([] if is_written else [1200])


def test_a_rank_that_is_0_no_longer_writes_no_more(tmp_path: Path) -> None:
    """It waits for what it was writing, since the next rank 0 opens the folder after it."""
    job, heard = make_job(tmp_path, 0), Heard()
    with opened(job, heard) as mine:
        job.progress.samples = 1000
        mine.save()
        job.world = SimpleNamespace(rank=1)
        mine.enter()
        assert numbers(tmp_path) == [1000] == heard.saved_at
        job.progress.samples = 1200
        mine.save()
    assert numbers(tmp_path) == [1000]


def test_a_rank_0_without_the_folder_runs_on_and_cannot_save_at_the_end(tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", 1)
    with opened(job, Heard()) as mine:
        job.world = SimpleNamespace(rank=0)
        mine.enter()
        job.progress.samples = 1000
        mine.save()
        with pytest.raises(
            AllstepError, match=r"the last state is not saved: .*run: this host has no such folder"
        ):
            mine.save_alone()
    assert not job.out.exists()
