"""Saving during training: order, copies, which checkpoints are kept, and a full disk."""

import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from allstep.errors import AllstepError
from allstep.train.checkpoint import saver as saving
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.saver import Saved, Saver, first_not_finite, outdated
from allstep.train.checkpoint.write_and_read import Snapshot


def snapshot(samples: int, value: float = 0.0) -> Snapshot:
    return Snapshot(samples, {"w": torch.full((4,), value)}, {}, {"samples": samples})


def test_what_is_saved_is_what_was_there_when_asked(tmp_path: Path) -> None:
    saver, weights = Saver(tmp_path), torch.zeros(1000)
    for samples in range(1, 4):
        saver.save(Snapshot(samples, {"w": weights}, {"w/m": weights}, {}))
        # The next step.
        weights += 1
    saver.close()
    found = checkpoint.newest(tmp_path).snapshot
    assert found is not None and found.samples == 3
    assert (found.weights["w"] == 2).all() and (found.optimizer["w/m"] == 2).all()


def test_the_caller_does_not_wait_and_the_newest_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, begun, outcomes = threading.Event(), threading.Event(), list[Saved]()

    def slowly(folder: Path, snapshot: Snapshot, write: object = checkpoint.write) -> Path:
        begun.set()
        assert may_write.wait(30)
        return write(folder, snapshot)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(saving.checkpoint, "write", slowly)
    saver = Saver(tmp_path, on_saved=outcomes.append)
    saver.save(snapshot(1))
    assert begun.wait(30)
    for samples in (2, 3, 4):
        # This would hang if it waited for the writer.
        saver.save(snapshot(samples))
    may_write.set()
    saver.close()
    assert [saved.samples for saved in outcomes] == [1, 4]
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
    assert outdated(paths, 9, 2, None) == paths[2:]
    assert outdated(paths, 9, 2, 5) == paths[3:]
    assert outdated(paths, 9, 2, 9) == paths[2:]
    assert outdated(paths, 9, 9, None) == []
    assert outdated(paths, 5, 1, None) == [paths[0], paths[1], paths[3]], (
        "those after the last one count for nothing"
    )


def numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.written(folder)]


def test_a_damaged_one_with_a_larger_number_takes_nobodys_place(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, snapshot(100))
    damaged = checkpoint.write(tmp_path, snapshot(900))
    (damaged / "weights.safetensors").write_bytes(b"")
    assert checkpoint.newest(tmp_path).path == tmp_path / f"{100:012}"
    for samples in (200, 300):
        saver = Saver(tmp_path, keep=1)
        saver.save(snapshot(samples))
        saver.close()
        assert numbers(tmp_path) == [samples]


class Disk:
    """A disk that fails some times, or for some checkpoints, with `error`; counts the attempts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, failures: int = 0, error: Exception | None = None
    ) -> None:
        self.failures, self.attempts = failures, 0
        self.refuses: set[int] = set()
        self.error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.write = checkpoint.write
        monkeypatch.setattr(saving.checkpoint, "write", self)
        monkeypatch.setattr(saving, "PAUSES", (0.0, 0.0, 0.0))

    def __call__(self, folder: Path, snapshot: Snapshot) -> Path:
        self.attempts += 1
        if self.attempts <= self.failures or snapshot.samples in self.refuses:
            raise self.error
        return self.write(folder, snapshot)


class Steps:
    """A saver that has finished writing after each save."""

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.outcomes: list[Saved] = []
        self._received = threading.Semaphore(0)
        self.saver = Saver(folder, keep, self.receive)

    def receive(self, saved: Saved) -> None:
        self.outcomes.append(saved)
        self._received.release()

    def save(self, samples: int, best: bool = False, attempts: int = 1) -> None:
        self.saver.save(snapshot(samples), best)
        for _ in range(attempts):
            assert self._received.acquire(timeout=30)


def test_the_best_one_stays_until_a_better_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, disk = Steps(tmp_path), Disk(monkeypatch)
    steps.save(100, best=True)
    disk.failures = disk.attempts + 2
    steps.save(200, best=True)
    # 200 is tried again and fails.
    steps.save(250, attempts=2)
    assert numbers(tmp_path) == [250, 100]
    # 200 is tried again and succeeds.
    steps.save(300, attempts=2)
    assert numbers(tmp_path) == [300, 200]
    steps.save(400)
    steps.saver.close()
    assert numbers(tmp_path) == [400, 200]
    assert [saved.samples for saved in steps.outcomes if saved.path] == [100, 250, 200, 300, 400]


def test_a_best_one_that_comes_late_does_not_drive_out_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, disk = Steps(tmp_path), Disk(monkeypatch)
    disk.refuses = {100}
    steps.save(100, best=True)
    steps.save(150, attempts=2)
    disk.refuses = {200}
    steps.save(200, attempts=2)
    steps.saver.close()
    assert numbers(tmp_path) == [150, 100]


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("a tensor that cannot be stored")]
)
def test_whatever_goes_wrong_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    steps = Steps(tmp_path)
    Disk(monkeypatch, failures=1, error=error)
    steps.save(1)
    steps.save(2)
    steps.saver.close()
    assert [(saved.samples, saved.error) for saved in steps.outcomes] == [(1, error), (2, None)]
    with pytest.raises(AllstepError, match="the thread that writes checkpoints has ended"):
        steps.saver.save(snapshot(3))


def test_what_must_be_written_is_tried_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, disk = Steps(tmp_path, keep=3), Disk(monkeypatch, failures=3)
    steps.save(7, best=True)
    steps.saver.close()
    saved = steps.saver.write_or_retry(snapshot(7))
    assert (saved.path, disk.attempts) == (tmp_path / f"{7:012}", 4)
    assert steps.saver.best == steps.saver.last == 7
    disk.failures = disk.attempts + 99
    saved = steps.saver.write_or_retry(snapshot(8))
    assert (saved.path, disk.attempts) == (None, 4 + 4)
    # This error is not worth a retry.
    disk.error = MemoryError()
    steps.saver.write_or_retry(snapshot(8))
    assert disk.attempts == 9
    assert numbers(tmp_path) == [7]


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Saved] = []
    saver = Saver(tmp_path, on_saved=outcomes.append)
    with monkeypatch.context() as patch:
        written = threading.Event()
        saver.on_saved = lambda saved: (outcomes.append(saved), written.set())[0]  # type: ignore[func-returns-value]

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "fsync", full)
        saver.save(snapshot(1))
        assert written.wait(30)
    saver.save(snapshot(2))
    saver.close()
    assert [(saved.samples, saved.path is None) for saved in outcomes] == [(1, True), (2, False)]
    assert isinstance(outcomes[0].error, OSError) and outcomes[0].error.errno == errno.ENOSPC
    assert [int(path.name) for path in checkpoint.written(tmp_path)] == [2]


def test_weights_that_are_not_finite_are_named_and_not_written(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    # A buffer of the user may hold infinities on purpose.
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert first_not_finite(model) is None
    good = Snapshot(
        1, {name: tensor.clone() for name, tensor in model.state_dict().items()}, {}, {}
    )
    model[1].running_var[0] = torch.inf
    assert first_not_finite(model) == "1.running_var"
    assert first_not_finite(model, good.weights) is None
    model[0].bias.data[1] = torch.nan
    outcomes: list[Saved] = []
    saver = Saver(tmp_path, on_saved=outcomes.append, find_broken=partial(first_not_finite, model))
    saver.save(good)
    saver.save(Snapshot(2, model.state_dict(), {}, {}))
    saver.close()
    assert [(saved.samples, str(saved.error)) for saved in outcomes][-1] == (
        2,
        "0.bias is not finite",
    )
    assert 2 not in numbers(tmp_path)


def test_a_folder_that_another_run_has_now_is_left_alone(tmp_path: Path) -> None:
    out, outcomes = tmp_path / "run", list[Saved]()
    out.mkdir()
    saver = Saver(out / "checkpoints", on_saved=outcomes.append)
    out.rename(tmp_path / "moved")
    out.mkdir()
    saver.save(snapshot(1))
    saver.close()
    assert "moved or replaced" in str(outcomes[0].error)
    assert list(out.iterdir()) == []
