"""The journal of a packing, `pack.jsonl` in the target folder: the plan, and the complete shards.

```
first line            {"plan": {"options": {...}, "origin": {...}, "num_shards": 12,
                                "mean_nbytes": 107400}}
per complete shard    {"shard": 3, "file": "x-00003-of-00012.tfrecord", "nbytes": 127800123,
                       "samples": 1190, "bad": [...]}
```

The line of a shard is written after its file was renamed to its final name. So a shard is complete
if its line exists and its file has the recorded size. A kill in between costs one shard, which is
packed again, to the same bytes. A line that a kill or a full disk cut short is removed before the
next one is written. A running packing holds a lock on the journal, so that only one at a time
writes into a folder.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from allstep.data.packing.plan import Plan
from allstep.data.sources.index import index_places
from allstep.data.sources.source import BadSample
from allstep.errors import DataError
from allstep.files.atomic import PART
from allstep.files.bounded import check_regular
from allstep.files.lock import try_lock

NAME = "pack.jsonl"
CLASSES, QUARANTINE = SIDE_FILES = ("classes.txt", "quarantine.jsonl")


@dataclass(frozen=True)
class Bad:
    """A bad sample that was not packed, and the reason."""

    number: int
    file: str
    offset: int
    reason: str

    @staticmethod
    def of(error: BadSample) -> "Bad":
        """Return the number, place and reason of `error` as a plain value."""
        return Bad(**error.to_json())


@dataclass(frozen=True)
class Done:
    """A complete shard: number, file name, bytes, good samples and bad samples."""

    shard: int
    file: str
    nbytes: int
    samples: int
    bad: tuple[Bad, ...] = ()


class Journal:
    """An open, locked journal; `opened` creates it."""

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        self.folder, self._file = folder, file
        self.plan: Plan | None = None
        self.done: dict[int, Done] = {}
        self._read()

    def begin(self, plan: Plan) -> None:
        """Write the first line, which holds the plan."""
        self._append({"plan": plan.to_json()})
        self.plan = plan

    def add(self, done: Done) -> None:
        """Write the line of a shard whose file is complete and has its final name."""
        self._append(asdict(done))
        self.done[done.shard] = done

    def missing(self) -> list[int]:
        """Return the numbers of the shards that remain to be packed."""
        assert self.plan is not None
        return [shard for shard in range(self.plan.num_shards) if shard not in self.done]

    def clear(self) -> None:
        """Remove all files that the plan names, and then the plan from the journal."""
        for shard in range(self.plan.num_shards if self.plan else 0):
            assert self.plan is not None
            path = self.folder / self.plan.file(shard)
            path.unlink(missing_ok=True)
            index_places(path)[0].unlink(missing_ok=True)
        for name in SIDE_FILES:
            (self.folder / name).unlink(missing_ok=True)
        self.plan, self.done = None, {}
        self._file.truncate(0)
        self._sync()

    def remove_parts(self) -> None:
        """Remove partly written files of a packing that was killed.

        The lock guarantees that no other packing is writing them.
        """
        for path in self.folder.glob(f".*{PART}"):
            path.unlink(missing_ok=True)

    def _read(self) -> None:
        """Read all complete lines, and truncate an incomplete one at the end."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._file.truncate(len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines:
                self.plan = Plan.from_json(lines[0]["plan"])
            for line in lines[1:]:
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            path = self.folder / NAME
            raise DataError(
                f"{path}: is not a journal that this version can read ({error}); pack into another"
                " folder"
            ) from error

    def _take(self, line: Mapping[str, Any]) -> None:
        done = Done(**{**line, "bad": tuple(Bad(**bad) for bad in line["bad"])})
        path = self.folder / done.file
        if path.is_file() and path.stat().st_size == done.nbytes:
            self.done[done.shard] = done

    def _append(self, line: Mapping[str, Any]) -> None:
        rest = memoryview(json.dumps(line).encode() + b"\n")
        # A write to a nearly full disk may be partial; only the next write raises the error.
        while rest:
            rest = rest[self._file.write(rest) :]
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def opened(folder: Path) -> Iterator[Journal]:
    """Open and lock the journal of `folder`; create folder and journal if there are none.

    If the journal has no plan in the end, it is removed, and so are folders that were created.
    """
    path = folder / NAME
    _check_folder(folder, path)
    made = _make(folder)
    try:
        with path.open("ab+", buffering=0) as file:
            check_regular(file.fileno(), path)
            _lock(file, folder)
            journal = Journal(folder, file)
            try:
                yield journal
            finally:
                if journal.plan is None:
                    path.unlink(missing_ok=True)
    finally:
        for each in made:
            if not any(each.iterdir()):
                each.rmdir()


def _check_folder(folder: Path, journal: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is not a folder; choose a new or empty folder for the shards")
    if folder.is_dir() and not journal.exists() and (strange := _strange(folder)):
        there = ", ".join(strange[:3]) + (
            f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        )
        raise DataError(f"{folder}: holds other files ({there}); pack into a new or empty folder")


def _strange(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _make(folder: Path) -> list[Path]:
    """Create the folder and its parents; return the created ones, innermost first."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _lock(file: IO[bytes], folder: Path) -> None:
    if not try_lock(file.fileno()):
        raise DataError(f"{folder}: another process is packing into it")
