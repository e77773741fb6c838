"""Reads a run folder into plain values.

```
RUN/
  run.jsonl                      the run record; a folder without it is not a run
  config.yaml                    the config
  quarantine*.jsonl              samples that could not be used
  checkpoints/*/manifest.json    sizes and checksums
  mistakes/                      see `mistakes`
  landscape/                     the loss around the weights, of `allstep landscape`
```

Only `run.jsonl` is required. Damaged files are omitted with a note that the page shows; a report
never fails because of a file that is not required. This module does not import torch: manifests are
JSON, and tensors are not read.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from allstep import runlog
from allstep.errors import ConfigError, DataError
from allstep.files.bounded import open_regular, parse_json, read_json, read_lines
from allstep.files.yaml import read_yaml
from allstep.report.mistakes import Confusion, Mistake, read_confusion, read_mistakes
from allstep.runlog import RunRecord
from allstep.study.landscape.result import Around, Line, read_around, read_line
from allstep.train.checkpoint.names import number_of
from allstep.train.config.renamed import with_new_keys

_SHOWN_BAD = 10
# bytes; a larger record is shown without its checksum
_LARGEST_HASHED = 1 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its files as (name, bytes, SHA-256)."""

    name: str
    files: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Run:
    """The readable content of a run folder."""

    name: str
    folder: Path
    record: RunRecord
    config: Mapping[str, Any]
    checksums: Mapping[str, str]
    """SHA-256 of config.yaml and run.jsonl, by name of the file."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints, the oldest first."""
    num_bad: int = 0
    """Number of samples that could not be used."""
    bad: tuple[Mapping[str, Any], ...] = ()
    """The first few of these samples."""
    mistakes: tuple[Mistake, ...] = ()
    confusion: Confusion | None = None
    landscape: Around | None = None
    """The loss around the weights."""
    line: Line | None = None
    """The loss on the line to another run."""
    notes: tuple[str, ...] = ()
    """Notes about what is damaged or omitted."""

    @property
    def num_workers(self) -> int:
        """Number of workers of the last start; 1 if it has none."""
        size = self._world.get("size")
        return size if isinstance(size, int) and size > 0 else 1

    @property
    def num_threads(self) -> int | None:
        """Threads of all workers of the last start together; None if unknown."""
        threads = self._world.get("threads")
        if (
            not isinstance(threads, list)
            or not threads
            or not all(isinstance(each, int) for each in threads)
        ):
            return None
        return sum(threads)

    @property
    def _world(self) -> Mapping[str, Any]:
        world = self.record.starts[-1].get("world")
        return world if isinstance(world, Mapping) else {}


def read_runs(folders: list[Path]) -> list[Run]:
    """Return the runs in `folders`, with a number in names that occur several times."""
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({number})" if names.count(run.name) > 1 else run.name)
        for number, run in enumerate(runs, 1)
    ]


def read_run(folder: Path) -> Run:
    """Return the run in `folder`; raise DataError if there is none, or no start line yet."""
    log = folder / "run.jsonl"
    record = _read_record(folder, log)
    notes: list[str] = []
    if torn := _count_torn(log):
        notes.append(f"run.jsonl: {torn} of its lines could not be read and were left out")
    config = record.starts[-1].get("config")
    num_bad, bad = _read_quarantine(folder)
    confusion = read_confusion(folder / "mistakes", notes)
    return Run(
        name=folder.resolve().name,
        folder=folder,
        record=record,
        config=with_new_keys(
            config if isinstance(config, Mapping) else _read_config(folder / "config.yaml", notes)
        ),
        checksums={
            file.name: found for file in (folder / "config.yaml", log) if (found := _checksum(file))
        },
        checkpoints=_read_checkpoints(folder / "checkpoints", notes),
        num_bad=num_bad,
        bad=bad,
        mistakes=read_mistakes(folder / "mistakes", notes, confusion.classes if confusion else ()),
        confusion=confusion,
        landscape=_read_landscape(read_around, folder, "around", notes),
        line=_read_landscape(read_line, folder, "line", notes),
        notes=tuple(notes),
    )


def _read_record(folder: Path, log: Path) -> RunRecord:
    if folder.is_file():
        raise DataError(f"{folder}: is a file; give the folder of the run, {folder.parent}")
    if not folder.is_dir():
        raise DataError(
            f"{folder}: there is no such folder; give the folder of a run (`allstep train --out"
            " DIR`)"
        )
    try:
        record = runlog.timed(runlog.read(log))
    except FileNotFoundError as error:
        raise DataError(f"{folder}: is not a run folder: it has no run.jsonl") from error
    except OSError as error:
        raise DataError(f"{log}: cannot be read: {error.strerror or error}") from error
    if not log.stat().st_size:
        raise DataError(f"{log}: is empty: the run has not started, or was killed at its start")
    if not record.starts:
        raise DataError(
            f"{log}: has no start line in {log.stat().st_size} bytes: it is not a run record"
        )
    return record


def _count_torn(log: Path) -> int:
    """Return the number of lines that are not JSON; lines of unknown kinds are no damage."""
    num_lines = sum(1 for line in read_lines(log) if line.strip())
    return num_lines - sum(1 for _ in runlog.lines(log))


def _read_config(file: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        config = read_yaml(file).value
    except FileNotFoundError:
        return {}
    except ConfigError as error:
        # The page must not contain paths of the machine.
        why = (
            type(error.__cause__).__name__
            if error.__cause__
            else str(error).replace(str(file), "config.yaml")
        )
        notes.append(f"config.yaml: could not be read ({why})")
        return {}
    return config if isinstance(config, Mapping) else {}


def _read_quarantine(folder: Path) -> tuple[int, tuple[Mapping[str, Any], ...]]:
    """Return the number of different bad samples that the ranks listed, and the first few."""
    found: dict[Any, Mapping[str, Any]] = {}
    for file in sorted(folder.glob("quarantine*.jsonl")):
        for line in _lines(file):
            entry = _json(line)
            if isinstance(entry, Mapping):
                found.setdefault(str(entry.get("number")), entry)
    return len(found), tuple(found.values())[:_SHOWN_BAD]


def _read_checkpoints(folder: Path, notes: list[str]) -> tuple[Checkpoint, ...]:
    manifests = sorted(
        file for file in folder.glob("*/manifest.json") if number_of(file.parent.name) is not None
    )
    return tuple(found for file in manifests if (found := _read_manifest(file, notes)))


def _read_manifest(file: Path, notes: list[str]) -> Checkpoint | None:
    try:
        manifest = read_json(file)
        entries = manifest["files"].items()
        files = tuple(
            (str(name), int(entry["nbytes"]), str(entry["sha256"])) for name, entry in entries
        )
    except FileNotFoundError:
        # A run that is still going may have just removed an old checkpoint.
        return None
    except (OSError, TypeError, KeyError, ValueError, AttributeError):
        name = file.parent.name
        notes.append(f"checkpoints/{name}: its manifest is damaged; --resume will not use it")
        return None
    return Checkpoint(file.parent.name, files)


T = TypeVar("T")


def _read_landscape(
    read: Callable[[Path], T | None], folder: Path, kind: str, notes: list[str]
) -> T | None:
    """Return what `read` finds in `folder`; None, with a note, if it is damaged."""
    try:
        return read(folder)
    except (OSError, ValueError, TypeError) as error:
        why = str(error) if isinstance(error, ValueError) else type(error).__name__
        notes.append(f"landscape/{kind}.json: {why}; it was left out")
        return None


def _lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of `file`; none if it cannot be read."""
    with contextlib.suppress(OSError):
        yield from read_lines(file)


def _json(line: bytes) -> Any:
    try:
        return parse_json(line, finite=False)
    except ValueError:
        return None


def _checksum(file: Path) -> str:
    """Return the SHA-256 of `file`; "" if it cannot be read or is too large."""
    with contextlib.suppress(OSError), open_regular(file) as opened:
        if os.fstat(opened.fileno()).st_size <= _LARGEST_HASHED:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    return ""
