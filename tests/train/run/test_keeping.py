"""A run ends or is saved only if its state is on disk: runs on a disk that is full at times."""

import errno
import os
from pathlib import Path
from typing import Any

import allstep
from allstep import runlog
from allstep.errors import AllstepError
from allstep.train import read_config
from allstep.train.checkpoint import saver as saving
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.run.loop import train
from allstep.train.run.progress import Paused
from allstep.train.watch.events import Result
from allstep.train.watch.record_callback import Record

OVERRIDES = [
    "epochs=2",
    "batch=100",
    "data.validation=37",
    "save.seconds=null",
    "save.epochs=0.5",
    "save.keep=1",
]
TOTAL = 2 * 1400


def on_a_disk(
    full_from: int, failures: int, max_seconds: float | None = None
) -> tuple[str, list[str], Path]:
    """Start or resume a run. Return how it ended, as text.

    The disk rejects this many checkpoints, from `full_from` samples on.
    """
    world, out, left = allstep.init(), Path.cwd() / "out", [failures]
    write = checkpoint.write

    def refuse(folder: Path, snapshot: checkpoint.Snapshot) -> Path:
        if snapshot.samples >= full_from and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(folder, snapshot)

    checkpoint.write, saving.PAUSES = refuse, (0.0, 0.0, 0.0)
    snapshot = checkpoint.newest(out / "checkpoints").snapshot
    callbacks = [Record(runlog.RunLog(out / "run.jsonl"))] if world.rank == 0 else []
    try:
        result: Any = train(
            read_config("digits", OVERRIDES),
            world,
            out,
            callbacks,
            snapshot=snapshot,
            max_seconds=max_seconds,
        )
        message = (
            "ended"
            if isinstance(result, Result)
            else "saved"
            if isinstance(result, Paused)
            else "?"
        )
    except AllstepError as error:
        message = f"{error.exit_code}: {error}"
    except SystemExit as error:
        message = f"exit {error.code}"
    finally:
        checkpoint.write = write
    return message, [path.name for path in checkpoint.written(out / "checkpoints")], out


def and_again(*args: Any) -> list[tuple[str, list[str], Path]]:
    """Run twice: on a full disk, then with free space."""
    first = on_a_disk(*args)
    allstep.comm.barrier()
    return [first, on_a_disk(0, 0)]


def test_a_run_whose_end_is_not_on_the_disk_has_not_ended(ranks: Any) -> None:
    (first, second), (other, _) = ranks(2, and_again, 2000, 99)
    message, names, out = first
    assert message.startswith("1: ")
    assert (
        f"over after {TOTAL} samples (all epochs are done), but that is not saved: [Errno 28] No"
        " space" in message
    )
    assert f"--resume {out} continues from checkpoint {names[0]}" in message
    assert int(names[0]) < 2000
    assert other[0] == "exit 1"
    assert second[:2] == ("ended", [f"{TOTAL:012}"])
    record = runlog.read(out / "run.jsonl")
    assert [start["position"] for start in record.starts] == [0, int(names[0])]
    assert len(record.ends) == 1
    assert [
        line["text"] for line in record.events if "last checkpoint was not written" in line["text"]
    ] != []


def test_a_disk_that_is_full_for_a_moment_at_the_end(ranks: Any) -> None:
    ((message, names, _),) = ranks(1, on_a_disk, TOTAL, 3)
    assert (message, names) == ("ended", [f"{TOTAL:012}"])


def test_saved_means_saved(ranks: Any) -> None:
    (((message, names, _), (after, _, out)),) = ranks(1, and_again, 0, 99, 0.001)
    assert message.startswith(
        "1: stopped after 100 of 2800 samples, but that is not saved: [Errno 28]"
    )
    assert message.endswith("continues from the start of the run: there is no complete checkpoint")
    assert names == []
    assert after == "ended"
    events = [line["text"] for line in runlog.read(out / "run.jsonl").events]
    assert not any("stopped and saved" in text for text in events)
    ((message, names, _),) = ranks(1, on_a_disk, 0, 2, 0.001)
    assert (message, names) == ("saved", [f"{100:012}"])
