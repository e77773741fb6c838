"""Runs that are killed, asked to stop or out of time, and resumed: the same bits at the end."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

import allstep.train.run.loop as run_module
from allstep import comm, runlog
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.watch.events import Score
from support.elastic_training import (
    ALLSTEP,
    ENVIRONMENT,
    EPOCH,
    MODEL,
    assert_same_end,
    last_checkpoint,
)
from support.elastic_training import started as started_command
from support.ranks import shared_memory_files, wait_until

OVERRIDES = [*MODEL, "epochs=6", "save.seconds=0.05", "save.keep=2"]
SOAK = bool(os.environ.get("ALLSTEP_SOAK"))


def command(out: Path, *overrides: str, workers: int = 2) -> list[str]:
    options = ["--workers", str(workers), "--out", str(out)]
    return [*ALLSTEP, "train", *OVERRIDES, *options, *overrides]


def complete(out: Path, *overrides: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(out, *overrides, workers=workers),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=150,
    )


def started(out: Path, *overrides: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Start a run, and remove what is left of it afterwards."""
    return started_command(command(out, *overrides), out.parent / "output")


def family(run: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(run.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(run: subprocess.Popen[str]) -> None:
    for process in family(run):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    run.wait(30)


def wait_for_samples(run: subprocess.Popen[str], out: Path, samples: int) -> None:
    """Wait until the run has logged that many samples, or has ended."""
    log = out / "run.jsonl"
    while run.poll() is None:
        if log.exists() and any(line.get("samples", 0) >= samples for line in runlog.lines(log)):
            return
        time.sleep(0.02)


TOTAL = 6 * EPOCH


@pytest.fixture(scope="module")
def undisturbed(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that is not interrupted."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    done = complete(out)
    assert done.returncode == 0, done.stderr
    return out


KILLS, AIMED, WITHIN_WRITES = (20, 10, 5) if SOAK else (3, 2, 1)
"""So many kills, of which so many are aimed at the write of a checkpoint, and so many at least hit
one."""


def kill_within_a_write(run: subprocess.Popen[str], out: Path) -> bool:
    """Kill rank 0 while it writes a checkpoint. Return False if the run ended before.

    A write takes milliseconds. So the writer is suspended as soon as a partial checkpoint exists,
    and resumed if the write was complete by then.
    """
    folder = out / "checkpoints"
    while run.poll() is None:
        for name in os.listdir(folder) if folder.is_dir() else ():
            # Its name has the writer's pid; ".gone" is one that is being removed.
            if not name.startswith(".0") or name.endswith(".gone"):
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                writer = psutil.Process(int(name.split(".")[2].partition("-")[0]))
                writer.suspend()
                wait_until(
                    lambda writer=writer: writer.status() == psutil.STATUS_STOPPED,
                    what="a stopped writer",
                )
                if (folder / name).is_dir():
                    writer.kill()
                    run.wait(60)
                    return True
                writer.resume()
    return False


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(3)
@pytest.mark.timeout(1500 if SOAK else 300)
def test_killed_again_and_again(undisturbed: Path, tmp_path: Path) -> None:
    """With SIGKILL, at random samples: the launcher and all workers, or one worker, whose loss ends
    the others.

    Some of the kills are within the write of a checkpoint. The run ends with the same bits, and no
    partial files remain.
    """
    out, draw = tmp_path / "run", random.Random(time.time_ns() if SOAK else 0)
    positions = sorted(draw.sample(range(100, TOTAL - 1000), KILLS))
    within = set(draw.sample(range(KILLS), AIMED))
    halves = 0
    for number, position in enumerate(positions):
        with started(out, "--resume", "auto") as run:
            wait_for_samples(run, out, position)
            assert run.poll() is None, (tmp_path / "output").read_text()
            victims = family(run)
            if number in within:
                halves += kill_within_a_write(run, out)
            elif draw.random() < 0.5 and len(victims) > 2:
                victims[-1].kill()
                run.wait(60)
        gone, alive = psutil.wait_procs(victims, timeout=30)
        assert not alive and len(gone) == len(victims)
    assert halves >= WITHIN_WRITES, f"{halves} of {AIMED} kills fell inside a write"
    done = complete(out, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert_same_end(out, undisturbed)
    assert [str(path) for path in out.rglob(".*")] == []
    wait_until(lambda: not shared_memory_files(), what="an empty /dev/shm")


@pytest.mark.usefixtures("processes")
def test_odd_checkpoints_do_not_hide_a_good_one(undisturbed: Path, tmp_path: Path) -> None:
    """Five damaged checkpoints, none older than the last good one: each is named, and the run
    resumes from the good one."""
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    log = out / "run.jsonl"
    log.write_text(
        "".join(f"{json.dumps(line)}\n" for line in runlog.lines(log) if line["kind"] != "end")
    )
    last, folder = last_checkpoint(out), out / "checkpoints"
    for number in (1, 2, 3):
        shutil.copytree(last, folder / f"{TOTAL + number:012}")
    (folder / f"{TOTAL + 1:012}" / "manifest.json").write_text("[" * 100_000)
    (folder / f"{TOTAL + 2:012}" / "state.json").unlink()
    os.mkfifo(folder / f"{TOTAL + 2:012}" / "state.json")
    # The third has the right checksums, and progress of another number of samples than its name.
    (folder / "²").mkdir()
    (last / "manifest.json").write_text('{"format": 1, "files": []}')
    done = complete(out, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    named = [line for line in done.stderr.splitlines() if "allstep: not used: " in line]
    assert len(named) == 5, done.stderr
    for expected in (
        "nested more than 50 levels",
        "is not a regular file",
        f"expected {TOTAL + 3}",
        "²",
        "is not a manifest",
    ):
        assert any(expected in line for line in named), (expected, named)
    assert_same_end(out, undisturbed)


def test_asked_to_stop_it_saves_and_resumes(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        with started(out, "--resume", "auto") as run:
            wait_for_samples(run, out, TOTAL // (3 if number == signal.SIGTERM else 2))
            run.send_signal(number)
            assert run.wait(60) == 75
    assert (
        len(
            [
                line
                for line in runlog.read(out / "run.jsonl").events
                if "stopped and saved" in line["text"]
            ]
        )
        == 2
    )
    done = complete(out, "--resume", str(out))
    assert done.returncode == 0, done.stderr
    assert_same_end(out, undisturbed)
    again = complete(out, "--resume", "auto")
    assert again.returncode == 0
    assert "this run has ended" in again.stdout + again.stderr


def train_until_stopped(out: Path, evaluation: int) -> str:
    """Train or resume a run; rank 1 gets SIGTERM within that evaluation, counted from 1.

    Return how the run ended.
    """
    world = comm.init()
    begun, original = itertools.count(1), run_module.evaluate

    def with_signal(*args: Any, **options: Any) -> Score:
        if next(begun) == evaluation and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **options)

    run_module.evaluate = with_signal
    overrides = [
        "epochs=2",
        "data.validation=50",
        "model.norm=batch",
        "save.epochs=null",
        "save.seconds=null",
    ]
    snapshot = checkpoint.newest(out / "checkpoints").snapshot
    result = run_module.train(read_config("digits", overrides), world, out, snapshot=snapshot)
    return (
        result.why
        if isinstance(result, run_module.Paused)
        else f"{result.test.loss!r} {result.best}"
    )


@pytest.mark.parametrize(
    "evaluation", [1, 2, 3]
)  # validation, validation after the last step, test
def test_asked_to_stop_within_an_evaluation(ranks: Any, tmp_path: Path, evaluation: int) -> None:
    """The run saves before the end of the evaluation, which the resumed run repeats."""
    (whole, _) = ranks(2, train_until_stopped, tmp_path / "whole", 0)
    out = tmp_path / "cut"
    assert ranks(2, train_until_stopped, out, evaluation) == ["SIGTERM"] * 2
    state = checkpoint.newest(out / "checkpoints").snapshot.state["standing"]
    assert (state["owes"] is None) == (evaluation == 3)
    assert ranks(2, train_until_stopped, out, 0)[0] == whole
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        ours, theirs = (last_checkpoint(tmp_path / each) / name for each in ("cut", "whole"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with started(out, "save.keep=20") as run:
        wait_for_samples(run, out, TOTAL // 2)
    newest = last_checkpoint(out)
    weights = newest / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    done = complete(out, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert f"{newest.name}/weights.safetensors: its bytes changed" in done.stderr
    assert_same_end(out, undisturbed)
