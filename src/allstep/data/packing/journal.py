"""The journal of a packing, `pack.jsonl` in the target folder: what is to be packed, and which
shards are done.

```
{"plan": {"options": {...}, "origin": {...}, "num_shards": 12, "mean_nbytes": 107400}}                   first line
{"shard": 3, "file": "x-00003-of-00012.tfrecord", "nbytes": 127800123, "samples": 1190, "bad": [...]}    one for each shard that is done
```

A line is written after its shard got its name, so a shard counts when its line is there and its
file has that size; a kill in between costs one shard, which is packed again, to the same bytes. A
line that a kill or a full disk cut short is taken away before the next one is written. While a
packing runs it holds a lock on the journal, so two cannot meet in one folder.
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
from allstep.files.bounded import check_regular
from allstep.files.lock import try_lock
from allstep.files.whole import PART

NAME = "pack.jsonl"
CLASSES, QUARANTINE = SIDE_FILES = ("classes.txt", "quarantine.jsonl")


@dataclass(frozen=True)
class Bad:
    """A sample that was left out."""

    number: int
    file: str
    offset: int
    reason: str

    @staticmethod
    def of(error: BadSample) -> "Bad":
        """The same as a plain value."""
        return Bad(**error.to_json())


@dataclass(frozen=True)
class Done:
    """A shard that is there."""

    shard: int
    file: str
    nbytes: int
    samples: int
    bad: tuple[Bad, ...] = ()


class Journal:
    """An open, locked journal; use `opened`."""

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        self.folder, self._file = folder, file
        self.plan: Plan | None = None
        self.done: dict[int, Done] = {}
        self._read()

    def begin(self, plan: Plan) -> None:
        """Writes the first line."""
        self._append({"plan": plan.to_json()})
        self.plan = plan

    def add(self, done: Done) -> None:
        """Writes the line of a shard whose file is there, whole and under its name."""
        self._append(asdict(done))
        self.done[done.shard] = done

    def missing(self) -> list[int]:
        """Shards that are still to be packed."""
        assert self.plan is not None
        return [shard for shard in range(self.plan.num_shards) if shard not in self.done]

    def clear(self) -> None:
        """Forgets the plan and removes the files that belong to it."""
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
        """Removes what a killed packing left half written; the lock says that nobody writes them
        now."""
        for path in self.folder.glob(f".*{PART}"):
            path.unlink(missing_ok=True)

    def _read(self) -> None:
        """Takes over all whole lines and cuts off what follows them."""
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
        while (
            rest
        ):  # a disk that is nearly full takes a part of it, and says so only at the next part
            rest = rest[self._file.write(rest) :]
        self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


@contextmanager
def opened(folder: Path) -> Iterator[Journal]:
    """The journal of `folder`, made when there is none; gone again if nothing was planned in the
    end."""
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
        raise DataError(f"{folder}: is not a folder; a packed set is one")
    if folder.is_dir() and not journal.exists() and (strange := _strange(folder)):
        there = ", ".join(strange[:3]) + (
            f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        )
        raise DataError(f"{folder}: holds other files ({there}); pack into a new or empty folder")


def _strange(folder: Path) -> Sequence[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _make(folder: Path) -> list[Path]:
    """Makes the folder; those that had to be made, the innermost first."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def _lock(file: IO[bytes], folder: Path) -> None:
    if not try_lock(file.fileno()):
        raise DataError(f"{folder}: another process is packing into it")
