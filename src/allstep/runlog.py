"""The run record: what happened in a run, one JSON object per line, appended as it happens.

```
{"kind": "start", "time": 1767225600.0, "version": ..., "config": {...}, "world": {...}, ...}
{"kind": "step", "time": ..., "samples": 1280, "loss": 0.9, "lr": 0.1, "seconds": 0.2, ...}
{"kind": "eval", "time": ..., "part": "validation", "samples": 55000, "accuracy": 0.86, ...}
{"kind": "sync" | "checkpoint" | "event" | "end", ...}
```

One process writes (rank 0); any number may read, also during the run: each line is passed to the
system complete and in one write. A writer that is killed leaves at most a torn last line. Readers
skip lines that they cannot parse and ignore fields that they do not know, so an old reader can
follow a new writer.

A record may be untrusted, so it is read within limits (`bounded`): a line of more than 50 levels,
or with an integer beyond 64 bits, counts as not parsable; a line of more than 16 MB ends the
reading. NaN and infinities are read as such. Anything but a regular file raises OSError, for
readers and the writer.

Times are seconds since 1970 and never decrease within a record: readers use them to find the lines
after the last start. A writer reads the wall clock once, when it opens the record, and from then on
counts with a clock that is never set; a resumed run starts no earlier than the last line before it.
So a wall clock that is set back or forward during a run has no effect.
"""

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from allstep.files.bounded import (
    check_regular,
    open_regular,
    open_to_append,
    parse_json,
    read_lines,
)

Fields = Mapping[str, Any]

LARGEST = 1e30
"""Numbers beyond it, or nearer to zero than its inverse, count as damage: arithmetic on them would
overflow."""
# Seconds since 1970; later times count as damage.
_LAST_DAY = 1e11
# Bytes at the end of a record in which the last time is searched.
_TAIL = 1 << 16
KINDS = ("start", "step", "eval", "checkpoint", "event", "end", "sync")


@dataclass(frozen=True)
class RunRecord:
    """The lines of a run record by kind, in the order of writing.

    A resumed run has several `starts`.
    """

    starts: tuple[Fields, ...] = ()
    steps: tuple[Fields, ...] = ()
    evals: tuple[Fields, ...] = ()
    checkpoints: tuple[Fields, ...] = ()
    events: tuple[Fields, ...] = ()
    ends: tuple[Fields, ...] = ()
    syncs: tuple[Fields, ...] = ()

    @property
    def start(self) -> Fields:
        """Return the first start line; empty if there is none yet."""
        return self.starts[0] if self.starts else {}

    @property
    def times(self) -> list[float]:
        """Return the times of all lines, kind by kind."""
        return [line["time"] for each in fields(self) for line in getattr(self, each.name)]

    @property
    def end(self) -> Fields | None:
        """Return the last end line; None if the run has not ended."""
        return self.ends[-1] if self.ends else None


class RunLog:
    """A writer of the run record at `path`, which is created, or continued by a resumed run.

    Values must be plain: finite numbers, text, lists, dictionaries.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(path)
        check_regular(self._file.fileno(), path)
        if _is_torn(path):
            self._file.write(b"\n")
        self._opened_at = max(time.time(), _last_time(path))
        self._opened = _steady_seconds()

    def now(self) -> float:
        """Return the current time of this record's clock, in seconds since 1970."""
        return self._opened_at + _steady_seconds() - self._opened

    def start(self, **fields: Any) -> None:
        """Write the start: version, config, world, machine, parameters, bytes, FLOP per sample."""
        self._write("start", fields)

    def step(self, **fields: Any) -> None:
        """Write progress: samples, loss, lr, seconds; per rank input, compute, wait and update."""
        self._write("step", fields)

    def eval(self, **fields: Any) -> None:
        """Write a score in evaluation mode.

        `part` is the split: validation, test, or train (a sample of the training split, at the
        end).
        """
        self._write("eval", fields)

    def sync(self, **fields: Any) -> None:
        """Write a synchronization point of asynchronous training: versions, figures by party."""
        self._write("sync", fields)

    def checkpoint(self, **fields: Any) -> None:
        """Write that a checkpoint was saved."""
        self._write("checkpoint", fields)

    def event(self, text: str, **fields: Any) -> None:
        """Write a notable event: a text, and the figures behind it."""
        self._write("event", {"text": text, **fields})

    def end(self, **fields: Any) -> None:
        """Write how the run ended."""
        self._write("end", fields)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, kind: str, fields: Fields) -> None:
        line = json.dumps({"kind": kind, "time": self.now(), **fields}, allow_nan=False)
        data = line.encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        # A disk that is nearly full accepts a part of the line without an error.
        if self._file.write(data) != len(data):
            os.ftruncate(self._file.fileno(), before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete line of the record at `path`, as a dict with at least a `kind`."""
    for line in read_lines(path):
        if line.endswith(b"\n") and (fields := parse(line)) is not None:
            yield fields


def read(path: Path) -> RunRecord:
    """Return the record at `path`, also of a run that has not ended."""
    found: dict[str, list[Fields]] = {kind: [] for kind in KINDS}
    for line in lines(path):
        found.get(line["kind"], []).append(line)
    return RunRecord(*(tuple(found[kind]) for kind in KINDS))


def kept(lines: Iterable[Fields]) -> list[Fields]:
    """Return the lines with a number of samples, in rising order.

    Lines that a resumed run wrote again replace the earlier ones.
    """
    stack: list[Fields] = []
    for line in lines:
        samples = line.get("samples")
        if (
            not isinstance(samples, int | float)
            or isinstance(samples, bool)
            or not 0 <= samples < LARGEST
        ):
            continue
        while stack and stack[-1]["samples"] >= samples:
            stack.pop()
        stack.append(line)
    return stack


def number(fields: Fields, key: str) -> float | None:
    """Return the number under `key`; None if it is absent, not finite or beyond `LARGEST`."""
    value = fields.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
        return None
    return float(value) if abs(value) > 1 / LARGEST else 0.0


def timed(record: RunRecord) -> RunRecord:
    """Return the record without lines that have no valid time."""
    kinds = {field.name: getattr(record, field.name) for field in fields(record)}
    return RunRecord(
        **{name: tuple(line for line in lines if _has_time(line)) for name, lines in kinds.items()}
    )


def _has_time(line: Fields) -> bool:
    return 0 < (number(line, "time") or 0.0) < _LAST_DAY


def parse(line: bytes) -> dict[str, Any] | None:
    """Return a line of a record as a dict; None if it cannot be parsed or has no `kind`."""
    try:
        found = parse_json(line, finite=False)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None


def _steady_seconds() -> float:
    """Return the seconds of a clock that is never set and also counts during suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _last_time(path: Path) -> float:
    """Return the time of the last line that has one, within the last 64 KB of the file; else 0."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        tail = file.read(_TAIL)
    found = [fields for line in tail.split(b"\n") if (fields := parse(line)) is not None]
    times = [line["time"] for line in found if isinstance(line.get("time"), int | float)]
    return float(next((time for time in reversed(times) if 0 < time < _LAST_DAY), 0.0))


def _is_torn(path: Path) -> bool:
    """Return whether the file ends without a newline."""
    with open_regular(path) as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
