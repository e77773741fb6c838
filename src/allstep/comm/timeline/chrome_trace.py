"""The timeline as a file in Chrome's trace format, which Perfetto and chrome://tracing read.

It is a JSON array with one event per line. A rank is a "process", a group of ranks a "thread" of
it; an operation is an event with a beginning and a length (`"ph": "X"`), and so are the spans
within it. Times are microseconds since the timeline began, on rank 0's clock.

The array may lack its closing bracket: the viewers accept that, so the file of a killed run is
valid up to its last line. It is written in whole lines, also when the disk fills up.

`Chrome` formats the lines of one rank, `TraceFile` writes lines. Another format would be another
class like `Chrome`.
"""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from allstep.comm.timeline.recorder import RecordedOperation, spans
from allstep.errors import ConfigError

# The descriptions of calls that `op.describe` returns.
_CALL_TEXT = re.compile(r"(\w+)(?:\((\w+)(?: \[([\d, ]*)\])?(?:, ([A-Z_]+))?(?:, .*)?\))?")


class Chrome:
    """Formats the lines of one rank. `offset`: nanoseconds to add to this rank's clock."""

    def __init__(self, rank: int, offset: int) -> None:
        self._rank = rank
        self._offset = offset
        self._tracks: dict[str, int] = {}

    def introduction(self, host: str, clock_error: int) -> str:
        """Return the lines that describe the rank.

        `clock_error` is the maximum error of its clock in nanoseconds.
        """
        lines = [
            self._about("process_name", {"name": f"rank {self._rank} on {host}"}),
            self._about("process_sort_index", {"sort_index": self._rank}),
        ]
        if clock_error:
            label = f"clock within {clock_error / 1e6:.3f} ms of rank 0's"
            lines.append(self._about("process_labels", {"labels": label}))
        return "".join(lines)

    def operations(self, ended: Iterable[RecordedOperation]) -> str:
        """Return the lines of finished operations."""
        return "".join(line for operation in ended for line in self._lines(operation))

    def left_out(self, count: int, now: int) -> str:
        """Return a line which states that `count` operations are missing before `now`."""
        name = f"{count} operations are missing: they finished faster than they could be written"
        event = {
            "name": name,
            "ph": "i",
            "s": "p",
            "ts": self.time(now),
            "pid": self._rank,
            "tid": 0,
        }
        return json.dumps(event) + ",\n"

    def _lines(self, operation: RecordedOperation) -> Iterable[str]:
        if operation.group not in self._tracks:
            yield self._introduce_track(operation.group)
        tid = self._tracks[operation.group]
        name, details = described(operation.text)
        args = {
            **details,
            "group": operation.group,
            **({"error": operation.error} if operation.error else {}),
        }
        yield self._span(
            name, "operation", operation.marks[0][0], operation.ended, tid, json.dumps(args)
        )
        for kind, start, end in spans(operation):
            yield self._span(kind, "part", start, end, tid, "{}")

    def _introduce_track(self, group: str) -> str:
        tid = self._tracks[group] = len(self._tracks) + 1
        return self._about("thread_name", {"name": f"group {group}"}, tid)

    def _span(self, name: str, category: str, start: int, end: int, tid: int, args: str) -> str:
        # Formatted by hand, because json.dumps of the whole event takes four times as long.
        return (
            f'{{"name": "{name}", "cat": "{category}", "ph": "X", "ts": {self.time(start):.3f},'
            f' "dur": {(end - start) / 1e3:.3f}, "pid": {self._rank}, "tid": {tid}, "args":'
            f" {args}}},\n"
        )

    def _about(self, name: str, args: dict[str, Any], tid: int = 0) -> str:
        return (
            json.dumps({"name": name, "ph": "M", "pid": self._rank, "tid": tid, "args": args})
            + ",\n"
        )

    def time(self, nanoseconds: int) -> float:
        """Convert a time of this rank's clock to the trace's microseconds."""
        return (nanoseconds + self._offset) / 1e3


@lru_cache(maxsize=1000)
def described(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a call and its details, from `all_reduce(float32 [3, 4], SUM)`."""
    found = _CALL_TEXT.fullmatch(text)
    if found is None:
        return text.partition("(")[0], {"call": text}
    name, dtype, shape, reduction = found.groups()
    details: dict[str, Any] = {"call": text}
    if dtype:
        details["dtype"] = dtype
    if shape is not None:
        details["shape"] = json.loads(f"[{shape}]")
        details["bytes"] = torch.Size(details["shape"]).numel() * getattr(torch, dtype).itemsize
    if reduction:
        details["reduction"] = reduction
    return name, details


def _open(path: str) -> int:
    """Open a file to write it from its beginning; raise OSError for a pipe.

    Without O_NONBLOCK, opening a pipe would wait for a reader.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
    is_pipe = OSError(errno.EINVAL, "is a pipe, expected a file")
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise is_pipe if error.errno == errno.ENXIO else error from None
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise is_pipe
    os.set_blocking(descriptor, True)
    return descriptor


class TraceFile:
    """A trace file that grows. Raises ConfigError with the reason if it cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = _open(path)
        except OSError as error:
            raise self._problem(error) from error
        self._num_bytes = 0
        try:
            self.write("[\n")
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, lines: str) -> None:
        """Write all of the lines, or none of them."""
        left = memoryview(lines.encode())
        total = len(left)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            # A pipe or device cannot be truncated.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._num_bytes)
                os.lseek(self._fd, self._num_bytes, os.SEEK_SET)
            raise self._problem(error) from error
        self._num_bytes += total

    def close(self, now: float) -> None:
        """Write the end of the array and close the file. `now`: in the trace's microseconds.

        The last event must have no comma after it.
        """
        end = {"name": "the timeline ends", "ph": "i", "s": "g", "ts": now, "pid": 0, "tid": 0}
        try:
            self.write(json.dumps(end) + "\n]\n")
        finally:
            os.close(self._fd)

    def _problem(self, error: OSError) -> ConfigError:
        return ConfigError(f"the timeline {self.path!r} cannot be written: {error.strerror}")
