"""How long does a run pause when a worker is killed?

| contender | what it is |
|---|---|
| allstep, hvd.elastic | a small CNN in three workers of `allstep run --min-np 2` |
| torchrun, restarted | the same training with DDP on Gloo and a checkpoint every ten steps |
| torchft | listed as missing: it is not installed, or this bench has no script for it |
| allstep, 2 GB killed | the killed worker holds two gigabytes, which the kernel frees first |

The bench starts each contender, waits until all workers have trained some steps, kills one with
SIGKILL, and reads from the workers' notes when they noticed it, had a new world, and finished a
step. Each repetition kills another rank: the first, the middle, the last one. All contenders get
one turn before any of them gets the next.

Forming alone is measured with workers that only sum, on three groups: 3 -> 2 and 8 -> 7 workers,
and 3 -> 2 with new shared memory, as after the seventeenth loss or when a worker joins.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from allstep.bench.launch import LaunchContender, end, environment_of
from allstep.bench.recover.notes import Note, read_notes
from allstep.bench.recover.result import (
    ALLSTEP,
    LARGE,
    TORCHFT,
    TORCHRUN,
    FormRow,
    RecoverResult,
    RecoverRow,
    Recovery,
)
from allstep.bench.result import Missing
from allstep.errors import AllstepError
from allstep.process.python import run_module

_SECONDS_TO_START = 120.0
_SECONDS_TO_RECOVER = 60.0
_STEPS_BEFORE = 10
_LARGE_MB = 2000
_LOOK_SECONDS = 0.02

Progress = Callable[[str], None]


class RecoverFailed(AllstepError):
    """A contender did not start, or did not recover."""


@dataclass(frozen=True)
class RecoverContender:
    """Workers to kill one of.

    command: starts `num_workers` of them; the folder of their notes is inserted for "FOLDER". kind:
    of the notes of steps after the kill. victim: the rank to kill; None for another one each time.
    """

    name: str
    command: tuple[str, ...]
    num_workers: int
    kind_after: str = "step"
    victim: int | None = None

    @property
    def is_peer(self) -> bool:
        """Whether it is not ours: then it may fail to recover."""
        return self.name == TORCHRUN


def contenders(large_mb: int = _LARGE_MB) -> list[RecoverContender]:
    """Return the contenders whose gap is measured, in the order of the table."""
    torchrun = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "3"]
    torchrun += ["--monitor-interval", "0.1"]
    # By its path: torchrun's `-m` would put the current folder on the search path.
    peer = (str(Path(__file__).with_name("torchrun_peer.py")), "FOLDER")
    large = _elastic(3, "train", "FOLDER", str(large_mb))
    return [
        RecoverContender(ALLSTEP, _elastic(3, "train", "FOLDER"), 3),
        RecoverContender(
            TORCHRUN, (*run_module("torch.distributed.run"), *torchrun, *peer), 3, "step after"
        ),
        RecoverContender(LARGE, large, 3, victim=1),
    ]


def formers(num_workers: Sequence[int] = (3, 8)) -> list[tuple[RecoverContender, float | None]]:
    """Return the worlds whose forming is measured, each with its target in seconds."""
    targets = {3: 0.010, 8: 0.030}
    kept = [
        (_former(f"{count} -> {count - 1}", count, "form"), targets.get(count))
        for count in num_workers
    ]
    first = num_workers[0]
    new = _former(f"{first} -> {first - 1}, new memory", first, "form-new")
    return [*kept, (new, None)]


def _former(name: str, count: int, kind: str) -> RecoverContender:
    return RecoverContender(name, _elastic(count, kind, "FOLDER"), count)


def _elastic(count: int, *worker: str) -> tuple[str, ...]:
    np = ("-np", str(count), "--min-np", "2", "--max-np", str(count))
    return tuple(
        run_module("allstep", "run", *np, *run_module(f"{__package__}.elastic_worker", *worker))
    )


def measure_recover(
    repetitions: int = 9,
    progress: Progress = lambda name: None,
    large_mb: int = _LARGE_MB,
    worlds: Sequence[int] = (3, 8),
) -> RecoverResult:
    """Kill a worker of every contender `repetitions` times.

    `progress` is called with the name of the contender before each of its turns. `large_mb`: the
    megabytes of the large worker. `worlds`: numbers of workers whose loss of one is measured.
    """
    compared, formed = contenders(large_mb), formers(worlds)
    recoveries: dict[str, list[Recovery | RecoverFailed]] = {each.name: [] for each in compared}
    forming: dict[str, list[float]] = {each.name: [] for each, _ in formed}
    for number in range(repetitions):
        for contender in compared:
            progress(contender.name)
            recoveries[contender.name].append(_recover_or_fail(contender, number))
        for contender, _ in formed:
            progress(contender.name)
            forming[contender.name].append(_form(contender, number))
    forms = [FormRow(each.name, forming[each.name], target) for each, target in formed]
    why = "no script for it" if find_spec("torchft") else "it is not installed"
    rows, missing = _rows(recoveries)
    return RecoverResult(rows, forms, [*missing, Missing(TORCHFT, why)])


def _rows(
    recoveries: Mapping[str, Sequence[Recovery | RecoverFailed]],
) -> tuple[list[RecoverRow], list[Missing]]:
    """Return the rows of the table, and what did not recover."""
    rows, missing = [], []
    for name, found in recoveries.items():
        good = [each for each in found if isinstance(each, Recovery)]
        bad = [each for each in found if isinstance(each, RecoverFailed)]
        if good:
            rows.append(RecoverRow(name, good))
        if bad:
            line = str(bad[0]).splitlines()[0]
            missing.append(Missing(name, f"{len(bad)} of {len(found)} runs: {line}"))
    return rows, missing


def num_turns(repetitions: int) -> int:
    """Return how often `measure_recover` calls `progress`."""
    return repetitions * (len(contenders()) + len(formers()))


def _recover_or_fail(contender: RecoverContender, number: int) -> Recovery | RecoverFailed:
    """Return a recovery; for a peer that did not recover, its error."""
    try:
        return _recover(contender, number)
    except RecoverFailed as error:
        if contender.is_peer:
            return error
        raise


def _recover(contender: RecoverContender, number: int) -> Recovery:
    """Run a contender, kill a worker, and return when the others recovered."""
    killed, after = _kill_one(contender, number)

    def latest(kind: str) -> float:
        return max(_first(notes, kind).at for notes in after.values()) - killed

    return Recovery(latest("noticed"), latest("formed"), latest(contender.kind_after))


def _form(contender: RecoverContender, number: int) -> float:
    """Run a contender, kill a worker, and return how long the slowest one took to form a world."""
    _, after = _kill_one(contender, number)
    return max(_first(notes, "formed").at - _first(notes, "placed").at for notes in after.values())


def _first(notes: Sequence[Note], kind: str) -> Note:
    return next(note for note in notes if note.kind == kind)


def _kill_one(contender: RecoverContender, number: int) -> tuple[float, Mapping[int, list[Note]]]:
    """Return when a worker was killed, and the notes of the others from then on, by pid."""
    with tempfile.TemporaryDirectory(prefix="allstep-bench-") as name:
        folder = Path(name)
        command = [str(folder) if part == "FOLDER" else part for part in contender.command]
        env = {**environment_of(LaunchContender(contender.name, ())), "OMP_NUM_THREADS": "1"}
        with (folder / "output").open("w") as sink:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            run = _Run(contender, folder, process)
            workers = run.wait_for_steps()
            place = number % len(workers) if contender.victim is None else contender.victim
            victim = run.by_rank(workers)[place]
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            return killed, run.wait_for_recovery(killed, victim)
        finally:
            end(process)


@dataclass(frozen=True)
class _Run:
    """A contender that runs."""

    contender: RecoverContender
    folder: Path
    process: subprocess.Popen[str]

    def by_rank(self, workers: Mapping[int, list[Note]]) -> list[int]:
        """Return the pids by rank: workers note their rank first."""
        return sorted(workers, key=lambda pid: _first(workers[pid], "rank").size)

    def wait_for_steps(self) -> Mapping[int, list[Note]]:
        """Wait until all workers have done some steps; return their notes."""

        def ready(notes: Mapping[int, list[Note]]) -> bool:
            steps = [sum(note.kind == "step" for note in each) for each in notes.values()]
            return len(steps) == self.contender.num_workers and min(steps) >= _STEPS_BEFORE

        return self._wait(ready, 0.0, _SECONDS_TO_START, "trained no steps")

    def wait_for_recovery(self, killed: float, victim: int) -> Mapping[int, list[Note]]:
        """Wait until all workers of the next world have done a step; return their notes since."""
        contender = self.contender
        is_restart = contender.kind_after != "step"
        expected = contender.num_workers - (0 if is_restart else 1)

        def ready(notes: Mapping[int, list[Note]]) -> bool:
            return len(notes) == expected

        def relevant(notes: Mapping[int, list[Note]]) -> dict[int, list[Note]]:
            formed = {
                pid: [note for note in each if note.kind != "step" or note.size == expected]
                for pid, each in notes.items()
                if pid != victim and any(note.kind == "formed" for note in each)
            }
            return {
                pid: each
                for pid, each in formed.items()
                if any(note.kind == contender.kind_after for note in each)
            }

        return self._wait(ready, killed, _SECONDS_TO_RECOVER, "did not recover", relevant)

    def _wait(
        self,
        ready: Callable[[Mapping[int, list[Note]]], bool],
        since: float,
        seconds: float,
        what: str,
        relevant: Callable[[Mapping[int, list[Note]]], dict[int, list[Note]]] = dict,
    ) -> Mapping[int, list[Note]]:
        limit = time.monotonic() + seconds
        while True:
            notes = {
                pid: [note for note in each if note.at >= since]
                for pid, each in read_notes(self.folder).items()
            }
            found = relevant(notes)
            if ready(found):
                return found
            ended = self.process.poll()
            if ended is not None or time.monotonic() > limit:
                why = f"ended with status {ended}" if ended is not None else f"{seconds:.0f} s"
                output = (self.folder / "output").read_text(errors="replace").strip()
                raise RecoverFailed(f"{self.contender.name} {what} ({why}):\n{output[-4000:]}")
            time.sleep(_LOOK_SECONDS)
