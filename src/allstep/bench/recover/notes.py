"""Notes of workers: what happened when. Each worker writes a file of its own, a line of JSON each.

The time is that of the monotonic clock, which all processes of a machine share. A worker may be
killed at any moment, so a line may be incomplete; the bench ignores it.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Note(NamedTuple):
    """One event of a worker: its kind, when it was, and the number of workers then.

    The note of kind "rank" has the rank of the worker as its size.
    """

    kind: str
    at: float
    size: int


class Notebook:
    """Writes the notes of this process into a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.notes"

    def write(self, kind: str, size: int, at: float | None = None) -> None:
        """Write a note; `at`: when it happened (default: now)."""
        note = Note(kind, time.monotonic() if at is None else at, size)
        with self._path.open("a") as file:
            file.write(json.dumps(note) + "\n")


def read_notes(folder: Path) -> dict[int, list[Note]]:
    """Return the notes of all workers so far, by pid."""
    return {int(file.stem): list(_lines(file)) for file in sorted(folder.glob("*.notes"))}


def _lines(file: Path) -> Iterator[Note]:
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield Note(*json.loads(line))
