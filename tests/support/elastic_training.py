"""Elastic runs of `allstep train`, and the reference of their results.

The reference of a run is a chain of runs in fixed worlds: each is stopped at the position at which
the world changed, and resumed from its checkpoint with the next number of workers (D15).

    complete(out, "epochs=3", "--fault", "kill@rank=0,step=40")
    chain(ranks, [*OVERRIDES, "epochs=3"], reference, 3, out)
    assert_same_end(out, reference)
"""

import contextlib
import filecmp
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from allstep import runlog, wire
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.world import places
from support.ranks import Ranks, clean_environment, shared_memory_files, wait_until

# All that could differ: running statistics, dropout, a moving average, random crops, uneven
# batches.
MODEL = [
    *("digits", "batch=50", "log_every=1", "data.validation=100"),
    *("model=lenet", "model.norm=batch", "model.options.hidden=32", "model.options.dropout=0.5"),
    *("ema.decay=0.9", "data.augment=PadAndCrop(8, pad=1)", "label_smoothing=0.1"),
]
OVERRIDES = [*MODEL, "save.seconds=1", "precision=float32"]
EPOCH = 1337
"""The training samples of an epoch: 1,437 digits without those of the validation split."""
ENVIRONMENT = {**clean_environment(), "OMP_NUM_THREADS": "1"}
ALLSTEP = (sys.executable, "-m", "allstep")


# Runs


def command(
    out: Path, *more: str, workers: int = 3, least: int = 1, program: Sequence[str] = ALLSTEP
) -> list[str]:
    options = ["--workers", str(workers), "--min-workers", str(least), "--out", str(out)]
    return [*program, "train", *OVERRIDES, *options, *more]


def complete(out: Path, *more: str, workers: int = 3, least: int = 1) -> str:
    """Run to the end and return the output."""
    before = shared_memory_files()
    done = subprocess.run(
        command(out, *more, workers=workers, least=least),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert shared_memory_files() == before
    return done.stdout + done.stderr


@contextlib.contextmanager
def started(
    arguments: Sequence[str], output: Path, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a command with its output in a file, and remove what is left of it afterwards."""
    with output.open("a") as file:
        run = subprocess.Popen(
            arguments,
            env={**ENVIRONMENT, **(env or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield run
        finally:
            if run.poll() is None:
                for process in [*psutil.Process(run.pid).children(recursive=True), run]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            run.wait(30)


def stop(run: subprocess.Popen[str], output: Path) -> None:
    """Let a run save its state and end."""
    run.send_signal(signal.SIGTERM)
    assert run.wait(90) == 75, output.read_text()


def workers_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the living workers of a launcher, without their helper processes."""
    found = []
    if run.poll() is not None:
        return found
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--min-workers" not in process.cmdline() and "ALLSTEP_TICKET" in process.environ():
                parent = process.parent()
                if parent is not None and "ALLSTEP_TICKET" not in parent.environ():
                    found.append(process)
    return found


class LastStep(NamedTuple):
    """The last step in a record: the position after it, and the size of its world."""

    samples: int = 0
    size: int = 0


_TAIL = 16_384


def last_step(out: Path) -> LastStep:
    """Return the last step that a run has recorded; zeros without one.

    Reads only the end of the record, so that it can be asked for often in a long run.
    """
    record = out / "run.jsonl"
    if not record.exists():
        return LastStep()
    with record.open("rb") as file:
        file.seek(max(0, record.stat().st_size - _TAIL))
        lines = file.read().split(b"\n")
    # The first and the last line may be incomplete.
    for line in reversed(lines[1:-1]):
        found = json.loads(line)
        if found["kind"] == "step":
            return LastStep(found["samples"], len(found["wait"]))
    return LastStep()


# References


def changes(out: Path) -> list[dict[str, Any]]:
    """Return the events about changes of the world."""
    events = runlog.read(out / "run.jsonl").events
    return [dict(event) for event in events if "position" in event]


class Link(NamedTuple):
    """A part of a reference: the size of its world, and where it stops (None: the end).

    is_due: stop before what is due after the last step, an evaluation.
    """

    size: int
    stop_at: int | None
    is_due: bool


def chain(ranks: Ranks, overrides: list[str], out: Path, first: int, run: Path) -> None:
    """Train the reference of `run`, which started with `first` workers and has ended.

    New processes train each part, as in a run that is resumed.
    """
    moves = changes(run)
    sizes = [first, *(event["workers"] for event in moves)]
    stops = [*((event["position"], event["due"]) for event in moves), (None, False)]
    for size, (stop_at, is_due) in zip(sizes, stops, strict=True):
        if stop_at != 0:
            # Threads decide the order of sums.
            env = {"OMP_NUM_THREADS": "1"}
            ranks(size, work_until, overrides, out, stop_at, is_due, env=env)


def long_chain(
    ranks: Ranks, overrides: list[str], out: Path, parts: list[Link], timeout: float
) -> None:
    """Train a reference of many parts in the same processes, which start and load torch once.

    Each part is a world of its own, which reads the checkpoint of the part before. The store counts
    the joins of each rank, so the worlds of one size share a store, and those of another do not.
    """
    sizes = sorted({part.size for part in parts})
    token = wire.new_token()
    with contextlib.ExitStack() as stack:
        servers = {size: stack.enter_context(wire.Server(token)) for size in sizes}
        stores = {size: f"127.0.0.1:{server.port}" for size, server in servers.items()}
        # Higher ranks wait in `init` while a smaller world trains.
        env = {"OMP_NUM_THREADS": "1", "ALLSTEP_TOKEN": token, "ALLSTEP_START_TIMEOUT": "3000"}
        ranks(max(sizes), work_parts, overrides, out, parts, stores, env=env, timeout=timeout)


def work_parts(overrides: list[str], out: Path, parts: list[Link], stores: dict[int, str]) -> None:
    """Train the parts of which this rank is a member, one after the other."""
    from allstep.comm.timeline.timeline import count_again
    from allstep.train.step import build

    rank = int(os.environ["ALLSTEP_RANK"])
    for size, stop_at, is_due in parts:
        if rank < size:
            # A rank that was in fewer parts has counted fewer worlds and optimizers.
            count_again()
            build._NUMBERS = itertools.count()
            place = places(["testhost"] * size)[rank].to_env()
            os.environ.update({**place, "ALLSTEP_STORE": stores[size]})
            work_until(overrides, out, stop_at, is_due)


def work_until(overrides: list[str], out: Path, stop_at: int | None, is_due: bool) -> None:
    """Train as a worker of a fixed world, and stop at this number of samples.

    is_due: stop before what is due after the last step, an evaluation.
    """
    from allstep.train.health.stop_request import Stopping
    from allstep.train.run import loop
    from allstep.train.run.rounds import each_step
    from allstep.train.run.train_request import TrainRequest
    from allstep.train.run.worker import work

    reached = []
    original = each_step.reduce_step, loop.Stopping

    def noted(trainer: Any, batch: Any, num_samples: int, clock: Any) -> Any:
        if stop_at is not None and batch.position + num_samples >= stop_at:
            reached.append(True)
        return original[0](trainer, batch, num_samples, clock)

    class StopThere(Stopping):
        @property
        def why(self) -> str | None:
            return "reached" if reached else None

        def must_leave(self) -> bool:
            return bool(reached) and is_due

    each_step.reduce_step, loop.Stopping = noted, StopThere  # type: ignore[misc]
    try:
        source, *keys = overrides
        work(TrainRequest(source, keys, out=out, resume=True))
    finally:
        each_step.reduce_step, loop.Stopping = original  # type: ignore[misc]


# Comparisons


def last_checkpoint(out: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return checkpoint.written(out / "checkpoints")[0]


def assert_same_checkpoint(ours: Path, theirs: Path) -> None:
    """The newest checkpoints of two runs have the same files, bit by bit."""
    first, second = last_checkpoint(ours), last_checkpoint(theirs)
    assert first.name == second.name
    names = sorted(path.name for path in first.iterdir())
    assert filecmp.cmpfiles(first, second, names, shallow=False) == (names, [], [])


def assert_same_end(ours: Path, theirs: Path) -> None:
    """Two runs that have ended have the same last checkpoint and test loss."""
    assert_same_checkpoint(ours, theirs)
    tests = [runlog.read(out / "run.jsonl").evals[-1] for out in (ours, theirs)]
    assert tests[0]["part"] == tests[1]["part"] == "test"
    assert tests[0]["loss"] == tests[1]["loss"]


def wait_for_step(
    run: subprocess.Popen[str], out: Path, output: Path, size: int, beyond: int
) -> int:
    """Wait for a step of a world of `size` workers beyond a position; return its position."""

    def position() -> int:
        assert run.poll() is None, output.read_text()
        step = last_step(out)
        return step.samples if step.size == size and step.samples > beyond else 0

    return int(wait_until(position, 240, f"a step of {size} workers beyond {beyond} samples"))
