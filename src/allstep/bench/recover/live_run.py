"""A contender of `allstep bench recover` that runs: it is started, watched by its notes, and ended.

with running("a name", command) as run:
    notes = run.wait_until(lambda notes: ..., 60, "trained no steps")
"""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from allstep.bench.launch import LaunchContender, end, environment_of
from allstep.bench.recover.notes import Note, read_notes
from allstep.errors import AllstepError

_LOOK_SECONDS = 0.02

Notes = Mapping[int, Sequence[Note]]
"""The notes of each worker, by pid."""

Found = TypeVar("Found")


class RecoverFailed(AllstepError):
    """A contender did not start, or did not recover."""


@dataclass(frozen=True)
class LiveRun:
    """A launcher and its workers, which write their notes into `folder`."""

    name: str
    folder: Path
    process: subprocess.Popen[str]

    def wait_until(
        self, find: Callable[[Notes], Found | None], seconds: float, missing: str
    ) -> Found:
        """Read the notes until `find` returns something; return that.

        `seconds`: the time limit. `missing`: what the error reports then.
        """
        limit = time.monotonic() + seconds
        while True:
            found = find(read_notes(self.folder))
            if found is not None:
                return found
            ended = self.process.poll()
            if ended is not None or time.monotonic() > limit:
                why = f"ended with status {ended}" if ended is not None else f"{seconds:.0f} s"
                output = (self.folder / "output").read_text(errors="replace").strip()
                raise RecoverFailed(f"{self.name} {missing} ({why}):\n{output[-4000:]}")
            time.sleep(_LOOK_SECONDS)


@contextmanager
def running(
    name: str, command: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[LiveRun]:
    """Run a command until the block ends.

    In `command`, "FOLDER" is replaced by the folder of the notes. `env`: further variables.
    """
    with tempfile.TemporaryDirectory(prefix="allstep-bench-") as place:
        folder = Path(place)
        whole = environment_of(LaunchContender(name, ()))
        with (folder / "output").open("w") as sink:
            process = subprocess.Popen(
                [str(folder) if part == "FOLDER" else part for part in command],
                env={**whole, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            yield LiveRun(name, folder, process)
        finally:
            end(process)


def first(notes: Sequence[Note], kind: str) -> Note:
    """Return the first note of a kind."""
    return next(note for note in notes if note.kind == kind)


def by_rank(workers: Notes) -> list[int]:
    """Return the pids by rank: workers note their rank first."""
    return sorted(workers, key=lambda pid: first(workers[pid], "rank").size)


def have_stepped(num_workers: int, num_steps: int) -> Callable[[Notes], Notes | None]:
    """Return a condition: `num_workers` workers have done at least `num_steps` steps each."""

    def find(notes: Notes) -> Notes | None:
        steps = [sum(note.kind == "step" for note in each) for each in notes.values()]
        return notes if len(steps) == num_workers and min(steps) >= num_steps else None

    return find
