"""Horovod's timeline: the phases of every tensor as rank 0 sees them, in Chrome's trace format.

```
allreduce.conv1.weight | NEGOTIATE_ALLREDUCE | ALLREDUCE                                          |
                         0   1 (ranks that   | QUEUE | MEMCPY_IN_ | GLOO_     | MEMCPY_OUT_       |
                             have requested) |       | FUSION_... | ALLREDUCE | FUSION_...        |
```

A tensor is a "process" under its full name; bars are pairs of events, `B` and `E`; times are
microseconds since the timeline began. The end of an operation has dtype and shape of the result; a
failed operation has none. A barrier is only negotiated. The phase of communication is named
GLOO_..., or MPI_... where Horovod without MPI uses that name too: tools know these names, whatever
the transport here.

The hooks of the engine collect lines; the thread that drives the engine writes them, at most thirty
times a second. The file is a complete JSON array after every write, so the file of a killed run is
readable. A full disk ends the timeline and not the run.
"""

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from allstep.comm.timeline.chrome_trace import TraceFile
from allstep.console.escape import print_notice
from allstep.engine.hooks import Hooks
from allstep.engine.request import Key, Kind, RequestSpec
from allstep.errors import ConfigError
from allstep.parallel.exchange import Named

_CLOSING = "\n]\n"
# Seconds between two writes, so that the file is at most about a tenth of a second behind.
_PERIOD = 0.03
_MOVES = {
    Kind.ALLREDUCE: "GLOO_ALLREDUCE",
    Kind.ALLGATHER: "GLOO_ALLGATHER",
    Kind.BROADCAST: "GLOO_BCAST",
    Kind.ALLTOALL: "MPI_ALLTOALL",
    Kind.REDUCESCATTER: "GLOO_REDUCESCATTER",
    Kind.ADASUM: "MPI_ADASUM_ALLREDUCE",
}
_ACTIVITIES = {kind.name: name for kind, name in _MOVES.items()}


class ClosedTraceFile(TraceFile):
    """A trace that is complete after every write: new lines overwrite the closing bracket."""

    def write(self, lines: str) -> None:
        """Write all of the lines, or none of them."""
        start = max(self._num_bytes - len(_CLOSING), 0)
        try:
            self._num_bytes = os.lseek(self._fd, start, os.SEEK_SET)
        except OSError as error:
            raise self._problem(error) from error
        try:
            super().write(lines + _CLOSING)
        except ConfigError:
            with contextlib.suppress(OSError):
                self._num_bytes += os.write(self._fd, _CLOSING.encode())
            raise

    def close(self, now: float) -> None:
        """Close the file, which is already complete."""
        os.close(self._fd)


class HorovodTrace(Hooks):
    """Listens to the engine of rank 0 and writes the trace.

    Raise ConfigError if the file cannot be written at the start. `sets`: the ranks of each process
    set, as the engine keeps them. `mark_cycles`: also mark each answer of the coordinator.
    """

    def __init__(
        self, path: str, sets: dict[int, tuple[int, ...]], mark_cycles: bool = False
    ) -> None:
        self._sets = sets
        self._mark_cycles = mark_cycles
        self._pids: dict[Key, int] = {}
        self._negotiating: dict[Key, Kind] = {}
        # Not yet written; engine and gradients add lines from threads of their own.
        self._lines: deque[str] = deque()
        # Protects the file and new tensors.
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._file: ClosedTraceFile | None = ClosedTraceFile(path)
        self._began = time.monotonic_ns()
        self._written_at = time.monotonic()
        start = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._lines.append(_about("process_name", 0, start))
        self._lines.append(",\n" + _about("process_sort_index", 0, {"sort_index": 0}))
        self._flush()

    def _now(self) -> int:
        return self._at(time.monotonic_ns())

    def _at(self, nanoseconds: int) -> int:
        """Return microseconds since the timeline began."""
        return (nanoseconds - self._began) // 1000

    # Events of the engine

    def reported(self, spec: RequestSpec, rank: int) -> None:
        members = self._sets.get(spec.process_set, ())
        if rank not in members or (spec.kind not in _MOVES and spec.kind is not Kind.BARRIER):
            return
        now = self._now()
        if spec.key not in self._negotiating:
            self._negotiating[spec.key] = spec.kind
            self._begin(spec.key, f"NEGOTIATE_{spec.kind.name}", now)
        self._add(spec.key, f'"ph": "X", "name": "{members.index(rank)}", "ts": {now}, "dur": 0')

    def answered(self) -> None:
        if self._mark_cycles and self._file is not None:
            self._lines.append(
                f',\n{{"ph": "i", "name": "CYCLE_START", "ts": {self._now()}, "s": "g"}}'
            )

    def negotiated(self, specs: Sequence[RequestSpec]) -> None:
        now = self._now()
        for spec in specs:
            if self._negotiating.pop(spec.key, None) is not None:
                self._end(spec.key, now)

    def refused(self, key: Key) -> None:
        now, kind = self._now(), self._negotiating.pop(key, None)
        if kind is not None:
            self._end(key, now)
        if kind in _MOVES:
            self._begin(key, kind.name, now)
            self._end(key, now)

    def begins(self, specs: Sequence[RequestSpec]) -> None:
        now = self._now()
        for spec in _moving(specs):
            self._begin(spec.key, spec.kind.name, now)
            self._begin(spec.key, "QUEUE", now)

    def activity(self, specs: Sequence[RequestSpec], name: str) -> None:
        now = self._now()
        for spec in _moving(specs):
            self._end(spec.key, now)
            self._begin(spec.key, _ACTIVITIES.get(name, name), now)

    def ends(self, specs: Sequence[RequestSpec], results: Sequence[Any] | None) -> None:
        now = self._now()
        for index, spec in enumerate(_moving(specs)):
            self._end(spec.key, now)
            self._end(spec.key, now, None if results is None else _output(results[index]))
        # If results are always available at once, the driver never calls `tick` itself.
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._written_at >= _PERIOD:
            self._written_at = now
            self._flush()

    def stopped(self) -> None:
        self.close()

    # Reductions that bypass the engine

    def gradients(self, reduced: Iterable[Named], began: int, agreed: int, ended: int) -> None:
        """Add gradients that were reduced together.

        Times in nanoseconds (monotonic): `began`, `agreed` (the ranks had agreed on what to reduce)
        and `ended`.
        """
        for name, parameter in reduced:
            key = (0, f"allreduce.{name}")
            self._begin(key, "NEGOTIATE_ALLREDUCE", self._at(began))
            self._end(key, self._at(agreed))
            self._begin(key, "ALLREDUCE", self._at(agreed))
            self._end(key, self._at(ended), parameter)

    # Events

    def _begin(self, key: Key, name: str, now: int) -> None:
        self._add(key, f'"ph": "B", "name": "{name}", "ts": {now}')

    def _end(self, key: Key, now: int, output: Tensor | None = None) -> None:
        args = ""
        if output is not None:
            args = (
                f', "args": {{"dtype": "{str(output.dtype)[6:]}", "shape": "{list(output.shape)}"}}'
            )
        self._add(key, f'"ph": "E", "ts": {now}{args}')

    def _add(self, key: Key, event: str) -> None:
        if self._file is not None:
            pid = self._pids.get(key) or self._introduce(key)
            self._lines.append(f',\n{{{event}, "pid": {pid}}}')

    def _introduce(self, key: Key) -> int:
        """Add a row for a new tensor; return its number."""
        with self._lock:
            if key not in self._pids:
                self._pids[key] = pid = len(self._pids) + 1
                self._lines.append(",\n" + _about("process_name", pid, {"name": key[1]}))
                self._lines.append(",\n" + _about("process_sort_index", pid, {"sort_index": pid}))
        return self._pids[key]

    # The file

    def close(self) -> None:
        """Write the remaining lines and close the file; later events are ignored."""
        self._flush()
        if os.getpid() == self._process:
            with self._lock:
                self._close_file()

    def _flush(self) -> None:
        """Write the collected lines; a no-op in a forked child, which does not own the file."""
        if not self._lines or os.getpid() != self._process:
            return
        with self._lock:
            lines = "".join(self._lines.popleft() for _ in range(len(self._lines)))
            if self._file is None:
                return
            try:
                self._file.write(lines)
            except ConfigError as error:
                print_notice(f"{error}; the timeline ends here, the run continues")
                self._close_file()

    def _close_file(self) -> None:
        ended, self._file = self._file, None
        if ended is not None:
            ended.close(self._now())


def _moving(specs: Sequence[RequestSpec]) -> Sequence[RequestSpec]:
    """Return the operations if they move data (all but barriers). They are of one kind."""
    return specs if specs[0].kind in _MOVES else ()


def _output(result: Any) -> Tensor:
    """Return the output tensor of a result; an alltoall also returns the rows from each rank."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _about(name: str, pid: int, args: dict[str, Any]) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": pid, "args": args})
