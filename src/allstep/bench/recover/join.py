"""`allstep bench recover --part join`: how long the others pause when a worker joins.

Three workers train a model with `hvd.elastic`. One is killed; the launcher starts another one in
its place, which joins between two steps of the two others once it has imported everything. Their
notes show the pause. The broadcast of the state is also timed alone, in a world of three ranks,
next to one copy of the same bytes and to other ways of sending them; see `broadcast_rank`.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from allstep.bench.comm.measure import start_team
from allstep.bench.recover.join_result import PAUSE_TARGETS, Joining, JoinRow
from allstep.bench.recover.live_run import Notes, by_rank, have_stepped, running
from allstep.bench.recover.notes import Note
from allstep.process.python import run_module

_NUM_WORKERS = 3
_STEPS_BEFORE, _STEPS_AFTER = 3, 5
_SECONDS_TO_START = 120.0
_SECONDS_TO_JOIN = 180.0

Progress = Callable[[str], None]


def measure_joins(
    repetitions: int,
    progress: Progress = lambda name: None,
    models: Sequence[str] = tuple(PAUSE_TARGETS),
) -> list[JoinRow]:
    """Return a row for each model; call `progress` `num_join_turns` times."""
    sent = {}
    for model in models:
        progress(f"broadcast, {model}")
        sent[model] = _broadcasts(model, repetitions)
    joinings: dict[str, list[Joining]] = {model: [] for model in models}
    for _ in range(repetitions):
        for model in models:
            progress(f"join, {model}")
            joinings[model].append(_join(model))
    return [JoinRow(model, sent[model][0], joinings[model], sent[model][1]) for model in models]


def num_join_turns(repetitions: int, models: Sequence[str] = tuple(PAUSE_TARGETS)) -> int:
    """Return how often `measure_joins` calls `progress`."""
    return len(models) * (repetitions + 1)


def _broadcasts(model: str, repetitions: int) -> tuple[int, Mapping[str, Sequence[float]]]:
    """Return the bytes of a model's state, and the seconds of each contender, in turns."""
    with contextlib.ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-")))
        rank = run_module(f"{__package__}.broadcast_rank", model)
        command = run_module("allstep", "run", "-np", str(_NUM_WORKERS), *rank)
        team = start_team("broadcast", command, _NUM_WORKERS, folder, ending)
        seconds: dict[str, list[float]] = {name: [] for name in team.names}
        for turn in range(repetitions + 1):
            for name, times in seconds.items():
                answers = team.request({"measure": name})
                # The first turn touches the memory.
                if turn:
                    times.append(max(answer["seconds"] for answer in answers))
        return answers[0]["nbytes"], seconds


def _join(model: str) -> Joining:
    """Kill a worker, and return the pause of the others when its successor joins."""
    np = ("-np", str(_NUM_WORKERS), "--min-np", "2", "--max-np", str(_NUM_WORKERS))
    worker = run_module(f"{__package__}.join_worker", "FOLDER", model)
    with running(f"join, {model}", run_module("allstep", "run", *np, *worker)) as run:
        ready = have_stepped(_NUM_WORKERS, _STEPS_BEFORE)
        workers = run.wait_until(ready, _SECONDS_TO_START, "trained no steps")
        victim = by_rank(workers)[-1]
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        after = run.wait_until(_grown(killed, victim), _SECONDS_TO_JOIN, "got no new worker")
    seen = [Joining.of(notes) for notes in after.values()]
    return max(seen, key=lambda joining: joining.pause)


def _grown(killed: float, victim: int) -> Callable[[Notes], Notes | None]:
    """Return a condition: the survivors have trained with a new worker."""

    def find(notes: Notes) -> Notes | None:
        found = {
            pid: since
            for pid, each in notes.items()
            if pid != victim and _num_steps(since := _since_change(each, killed)) > _STEPS_AFTER
        }
        return found if len(found) == _NUM_WORKERS - 1 else None

    return find


def _since_change(notes: Sequence[Note], killed: float) -> Sequence[Note]:
    """Return the notes since the last step in the smaller world; none if there was no such step."""
    places = [
        place
        for place, note in enumerate(notes)
        if note.kind == "step" and note.size < _NUM_WORKERS and note.at > killed
    ]
    return notes[places[-1] :] if places else ()


def _num_steps(notes: Sequence[Note]) -> int:
    return sum(note.kind == "step" for note in notes)
