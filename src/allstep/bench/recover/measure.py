"""How long does a run pause when a worker is killed, and how long does it take to form a world?

| contender | what it is |
|---|---|
| allstep, hvd.elastic | a small CNN in three workers of `allstep run --min-np 2` |
| torchrun, restarted | the same training with DDP on Gloo and a checkpoint every ten steps |
| torchft, its defaults | the same training with its manager, if a Python with torchft is found |
| torchft, 1 s heartbeat | the same with a heartbeat timeout of 1 s in place of 5 s |
| allstep, 2 GB killed | the killed worker holds two gigabytes, which the kernel frees first |

The bench starts each contender, waits until all workers have trained some steps, kills one with
SIGKILL, and reads from the workers' notes when they noticed it, had a new world, and finished a
step. Each repetition kills another rank: the first, the middle, the last one. All contenders get
one turn before any of them gets the next.

Forming alone is measured with workers that only sum, on three groups: 3 -> 2 and 8 -> 7 workers,
and 3 -> 2 with new shared memory, as after the seventeenth loss or when a worker joins.

`join` and `quiet` measure the other parts.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from allstep.bench.recover.join import measure_joins, num_join_turns
from allstep.bench.recover.live_run import (
    Notes,
    RecoverFailed,
    by_rank,
    first,
    have_stepped,
    running,
)
from allstep.bench.recover.quiet import measure_quiet
from allstep.bench.recover.result import (
    ALLSTEP,
    LARGE,
    TORCHFT,
    TORCHFT_FAST,
    TORCHRUN,
    FormRow,
    RecoverResult,
    RecoverRow,
    Recovery,
)
from allstep.bench.result import Missing
from allstep.errors import ConfigError
from allstep.process.python import run_module

_SECONDS_TO_START = 120.0
_SECONDS_TO_RECOVER = 60.0
_STEPS_BEFORE = 10
_LARGE_MB = 2000

TORCHFT_PYTHON = "ALLSTEP_TORCHFT_PYTHON"
"""Names a Python that has torchft, which may need an environment of its own."""
# What `--part` selects.
PARTS = ("kill", "form", "join", "quiet")

Progress = Callable[[str], None]


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
        return self.name not in (ALLSTEP, LARGE)


def torchft_python() -> str | None:
    """Return a Python that has torchft (and allstep): ours, or that of ALLSTEP_TORCHFT_PYTHON."""
    return sys.executable if find_spec("torchft") else os.environ.get(TORCHFT_PYTHON)


def _torchft() -> list[RecoverContender]:
    """Return the contenders with torchft; none if there is no Python that has it."""
    if (python := torchft_python()) is None:
        return []
    script = (python, str(Path(__file__).with_name("torchft_peer.py")), "FOLDER")
    return [
        RecoverContender(TORCHFT, script, 3),
        RecoverContender(TORCHFT_FAST, (*script, "--heartbeat_timeout_ms", "1000"), 3),
    ]


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
        *_torchft(),
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
    parts: Sequence[str] = PARTS,
) -> RecoverResult:
    """Measure `parts`, `repetitions` times each.

    `progress` is called with the name of the contender before each of its turns, `num_turns` times.
    """
    kill, form = "kill" in parts, "form" in parts
    rows, forms, missing = _measure_kills(
        contenders() if kill else [], formers() if form else [], repetitions, progress
    )
    joins = measure_joins(repetitions, progress) if "join" in parts else []
    quiet = measure_quiet(repetitions, progress) if "quiet" in parts else None
    return RecoverResult(rows, forms, missing, joins, quiet)


def _measure_kills(
    compared: Sequence[RecoverContender],
    formed: Sequence[tuple[RecoverContender, float | None]],
    repetitions: int,
    progress: Progress,
) -> tuple[list[RecoverRow], list[FormRow], list[Missing]]:
    """Kill a worker of every contender `repetitions` times, in turns."""
    recoveries: dict[str, list[Recovery | RecoverFailed]] = {each.name: [] for each in compared}
    forming: dict[str, list[float]] = {each.name: [] for each, _ in formed}
    for number in range(repetitions):
        for contender in compared:
            progress(contender.name)
            recoveries[contender.name].append(_recover_or_fail(contender, number))
        for contender, _ in formed:
            progress(contender.name)
            forming[contender.name].append(_form(contender, number))
    rows, missing = _rows(recoveries)
    forms = [FormRow(each.name, forming[each.name], target) for each, target in formed]
    if compared and torchft_python() is None:
        why = f"it is not installed; {TORCHFT_PYTHON} may name a Python that has it and allstep"
        missing.append(Missing("torchft", why))
    return rows, forms, missing


def num_turns(repetitions: int, parts: Sequence[str] = PARTS) -> int:
    """Return how often `measure_recover` calls `progress`."""
    turns = {
        "kill": repetitions * len(contenders()),
        "form": repetitions * len(formers()),
        "join": num_join_turns(repetitions),
        "quiet": repetitions,
    }
    return sum(turns[part] for part in parts)


def parse_parts(text: str) -> list[str]:
    """Return the parts of a list such as `kill,join`; raise ConfigError for others."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"--part {part!r}: expected one or more of {', '.join(PARTS)}")
    return list(dict.fromkeys(parts))


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
    killed, after = kill_one(contender, number)
    return Recovery.of(killed, after, contender.kind_after)


def _form(contender: RecoverContender, number: int) -> float:
    """Run a contender, kill a worker, and return how long the slowest one took to form a world."""
    _, after = kill_one(contender, number)
    return max(first(notes, "formed").at - first(notes, "placed").at for notes in after.values())


def kill_one(contender: RecoverContender, number: int) -> tuple[float, Notes]:
    """Return when a worker was killed, and the notes of the others from then on, by pid."""
    with running(contender.name, contender.command) as run:
        ready = have_stepped(contender.num_workers, _STEPS_BEFORE)
        workers = run.wait_until(ready, _SECONDS_TO_START, "trained no steps")
        place = number % len(workers) if contender.victim is None else contender.victim
        victim = by_rank(workers)[place]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        is_restart = contender.kind_after != "step"
        size = contender.num_workers - (0 if is_restart else 1)
        find = recovered(killed, {victim}, size, contender.kind_after)
        return killed, run.wait_until(find, _SECONDS_TO_RECOVER, "did not recover")


def recovered(
    since: float, lost: Set[int], size: int, kind_after: str = "step"
) -> Callable[[Notes], Notes | None]:
    """Return a condition: all `size` workers of the next world have done a step.

    `since`: when workers were lost; earlier notes are dropped. `lost`: their pids. `kind_after`: of
    the notes of steps in the next world.
    """

    def find(notes: Notes) -> Notes | None:
        later = {
            pid: [
                note
                for note in each
                if note.at >= since and (note.kind != "step" or note.size == size)
            ]
            for pid, each in notes.items()
            if pid not in lost
        }
        found = {
            pid: each
            for pid, each in later.items()
            if {"formed", kind_after} <= {note.kind for note in each}
        }
        return found if len(found) == size else None

    return find
