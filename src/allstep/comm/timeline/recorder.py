"""Records what this rank does in its collectives: the part of the timeline that they call.

An operation is a list of marks. At each mark one kind of activity ends and another begins, so the
kinds fill the operation without gap or overlap:

    all_reduce   | moving | waiting          | adding | moving |
                 began    barrier                              ended

Activity without another mark is "moving". `during(kind, act, ...)` calls `act` and marks before and
after; calls may be nested, and the kind before continues afterwards. A thread runs one operation at
a time, and an operation is run by one thread, so the current operation is found by thread: code
that waits or adds needs no reference to it.

`active` is None as long as no timeline is written; a collective checks it once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

WAITING, ADDING, MOVING, GLOO = "waiting", "adding", "moving", "gloo"
BETWEEN_HOSTS = "between hosts"

# Operations that wait to be written; about 30 MB.
MAX_OPERATIONS = 50_000
# Nanoseconds; shorter activity is not shown as a span of its own.
_SHORT = 500

# One clock for all processes of a host.
clock = time.monotonic_ns
active: "Recorder | None" = None
# A time in nanoseconds, and the kind of activity from then on.
Mark = tuple[int, str]
# Its attribute `running` is the operation that this thread runs.
_thread = threading.local()


class RecordedOperation(NamedTuple):
    """One collective of a group, as this rank ran it.

    `text` is the description of the call; `error` is the name of the exception, or empty. The first
    mark is the beginning; `ended` is in nanoseconds.
    """

    group: str
    text: str
    marks: Sequence[Mark]
    ended: int
    error: str


class Running:
    """An operation under way."""

    def __init__(self) -> None:
        self.marks: list[Mark] = [(clock(), MOVING)]

    def during(self, kind: str, act: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Return what `act` returns; its time counts as this kind."""
        before = self.marks[-1][1]
        self.marks.append((clock(), kind))
        try:
            return act(*args, **named)
        finally:
            self.marks.append((clock(), before))


class Recorder:
    """Keeps finished operations until they are taken, and counts those that it has to leave out."""

    def __init__(self, max_operations: int = MAX_OPERATIONS) -> None:
        self._max_operations = max_operations
        self._ended: deque[RecordedOperation] = deque()
        self._num_left_out = 0

    @contextmanager
    def operation(self, group: str, text: str) -> Iterator[Running]:
        """Record this context as one operation, or as a part of the one that encloses it."""
        outer: Running | None = getattr(_thread, "running", None)
        if outer is not None:
            yield outer
            return
        running = _thread.running = Running()
        error = ""
        try:
            yield running
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            _thread.running = None
            self._keep(RecordedOperation(group, text, running.marks, clock(), error))

    def _keep(self, operation: RecordedOperation) -> None:
        if len(self._ended) < self._max_operations:
            self._ended.append(operation)
        else:
            self._num_left_out += 1

    def take(self) -> tuple[list[RecordedOperation], int]:
        """Return the operations since the last call, and how many were left out."""
        taken = [self._ended.popleft() for _ in range(len(self._ended))]
        left_out, self._num_left_out = self._num_left_out, 0
        return taken, left_out


def operation(group: str, text: str) -> AbstractContextManager[Running | None]:
    """Record this context with the active recorder, if there is one; see `Recorder.operation`."""
    return nullcontext() if active is None else active.operation(group, text)


def during(kind: str, act: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call `act` and record its time in this thread's operation, if one is recorded.

    See `Running.during`.
    """
    running: Running | None = getattr(_thread, "running", None)
    return act(*args, **named) if running is None else running.during(kind, act, *args, **named)


def spans(operation: RecordedOperation) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, start, end) one after the other, from the beginning to the end.

    Very short activity belongs to the span before it.
    """
    start, kind = operation.marks[0]
    ends = [*(at for at, _ in operation.marks[1:]), operation.ended]
    for (at, doing), end in zip(operation.marks, ends, strict=True):
        if doing != kind and end - at >= _SHORT:
            yield kind, start, at
            start, kind = at, doing
    yield kind, start, operation.ended
