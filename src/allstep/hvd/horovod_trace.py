"""Horovod's timeline: the life of every tensor as rank 0 sees it, in Chrome's trace format.

```
allreduce.conv1.weight   | NEGOTIATE_ALLREDUCE      |  | ALLREDUCE                                                             |
                           0   1 (ranks that come)     | QUEUE | MEMCPY_IN_FUSION_BUFFER |
                           GLOO_ALLREDUCE | MEMCPY_OUT_FUSION_... |
```

A tensor is a "process", by its full name; bars are pairs of events, `B` and `E`; times are
microseconds since the timeline began. The end of an operation tells dtype and shape of the result;
there is none when it failed. A barrier is only negotiated. What moves the data is called GLOO_...,
or MPI_... where Horovod without MPI says so too: tools know these names, whatever moves it here.

The hooks of the engine note lines; whoever drives the engine writes them, at most thirty times a
second. The file is a whole JSON array after every writing, so one that a killed run leaves can be
read. A disk that fills up ends the timeline and not the run.
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
# seconds between two writings: whoever looks a tenth of a second later finds what happened
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
    """A trace that is whole after every writing: what comes next takes the place of the closing
    bracket."""

    def write(self, lines: str) -> None:
        """All of the lines, or none of them."""
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
        """There is nothing to add."""
        os.close(self._fd)


class HorovodTrace(Hooks):
    """Listens to the engine of rank 0 and writes what it hears. Raises ConfigError when the file
    cannot be written at the start.

    sets: the ranks of each process set, as the engine keeps them.
    """

    def __init__(
        self, path: str, sets: dict[int, tuple[int, ...]], mark_cycles: bool = False
    ) -> None:
        self._sets = sets
        self._mark_cycles = mark_cycles
        self._pids: dict[Key, int] = {}
        self._negotiating: dict[Key, Kind] = {}
        self._lines: deque[str] = (
            deque()
        )  # not yet written; engine and gradients add from threads of their own
        self._lock = threading.Lock()  # of the file and of new tensors
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
        """Microseconds since the timeline began."""
        return (nanoseconds - self._began) // 1000

    # What the engine tells

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
        # a driver for whom results are always there already looks after nothing else
        self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._written_at >= _PERIOD:
            self._written_at = now
            self._flush()

    def stopped(self) -> None:
        self.close()

    # What does not pass through the engine

    def gradients(self, reduced: Iterable[Named], began: int, agreed: int, ended: int) -> None:
        """These were reduced together.

        When (monotonic_ns) it began, when the ranks had agreed on what to reduce, when it was over.
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
        """A tensor that has not been seen before."""
        with self._lock:
            if key not in self._pids:
                self._pids[key] = pid = len(self._pids) + 1
                self._lines.append(",\n" + _about("process_name", pid, {"name": key[1]}))
                self._lines.append(",\n" + _about("process_sort_index", pid, {"sort_index": pid}))
        return self._pids[key]

    # The file

    def close(self) -> None:
        """Write what is left. Nothing is heard afterwards."""
        self._flush()
        if os.getpid() == self._process:
            with self._lock:
                self._let_go()

    def _flush(self) -> None:
        """In a forked child the file is not ours."""
        if not self._lines or os.getpid() != self._process:
            return
        with self._lock:
            lines = "".join(self._lines.popleft() for _ in range(len(self._lines)))
            if self._file is None:
                return
            try:
                self._file.write(lines)
            except ConfigError as error:
                print_notice(f"{error}; the timeline ends here, the run goes on")
                self._let_go()

    def _let_go(self) -> None:
        ended, self._file = self._file, None
        if ended is not None:
            ended.close(self._now())


def _moving(specs: Sequence[RequestSpec]) -> Sequence[RequestSpec]:
    """Operations that are carried out together are of one kind; a barrier carries nothing."""
    return specs if specs[0].kind in _MOVES else ()


def _output(result: Any) -> Tensor:
    """An alltoall also tells how many rows came from each rank."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _about(name: str, pid: int, args: dict[str, Any]) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": pid, "args": args})
