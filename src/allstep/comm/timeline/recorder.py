"""What this rank does in its collectives, noted as it happens: the part of the timeline that the
collectives see.

An operation is a row of marks. At each mark one kind of doing ends and another begins, so the kinds
fill the operation without gap or overlap::

    all_reduce   | moving | waiting          | adding | moving |
                 began    meet                                 ended

What nobody says otherwise is moving. `during(kind, act, ...)` calls `act` and marks before and
after; it may be nested, and what was going on before goes on afterwards. A thread carries out one
operation at a time, and one operation is carried out by one thread, so the operation under way is
found by thread: whoever waits or adds need not be told of it.

`active` is None as long as no timeline is written; a collective looks there once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

WAITING, ADDING, MOVING, GLOO = "waiting", "adding", "moving", "gloo"
BETWEEN_HOSTS = "between hosts"

MAX_OPERATIONS = 50_000  # that wait to be written; some 30 MB
_SHORT = 500  # nanoseconds: what is shorter is not shown as a span of its own

clock = time.monotonic_ns  # one clock for all processes of a host
active: "Recorder | None" = None
Mark = tuple[int, str]  # from this nanosecond on, what the operation is doing
_thread = threading.local()  # .running: the operation that this thread carries out


class RecordedOperation(NamedTuple):
    """One collective of a group, as this rank carried it out. said: the call in words. error: the
    name of what it raised, or empty."""

    group: str
    text: str
    marks: Sequence[Mark]  # the first is the beginning
    ended: int
    error: str


class Running:
    """An operation under way."""

    def __init__(self) -> None:
        self.marks: list[Mark] = [(clock(), MOVING)]

    def during(self, kind: str, act: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What `act` returns; the time that it takes is of this kind."""
        before = self.marks[-1][1]
        self.marks.append((clock(), kind))
        try:
            return act(*args, **named)
        finally:
            self.marks.append((clock(), before))


class Recorder:
    """Keeps operations that have ended until somebody takes them.

    When nobody does, it counts what it leaves out.
    """

    def __init__(self, max_operations: int = MAX_OPERATIONS) -> None:
        self._max_operations = max_operations
        self._ended: deque[RecordedOperation] = deque()
        self._num_left_out = 0

    @contextmanager
    def operation(self, group: str, text: str) -> Iterator[Running]:
        """All that happens within is one operation. Within another one it is a part of that."""
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
        """What has ended since the last time, and how many operations had to be left out."""
        taken = [self._ended.popleft() for _ in range(len(self._ended))]
        left_out, self._num_left_out = self._num_left_out, 0
        return taken, left_out


def operation(group: str, text: str) -> AbstractContextManager[Running | None]:
    """`Recorder.operation` of the active one; nothing when there is none."""
    return nullcontext() if active is None else active.operation(group, text)


def during(kind: str, act: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """`Running.during` of the operation that this thread carries out; a plain call when none is
    recorded."""
    running: Running | None = getattr(_thread, "running", None)
    return act(*args, **named) if running is None else running.during(kind, act, *args, **named)


def spans(operation: RecordedOperation) -> Iterator[tuple[str, int, int]]:
    """(kind, start, end) one after the other, from the beginning to the end.

    What is very short belongs to the span before it.
    """
    start, kind = operation.marks[0]
    ends = [*(at for at, _ in operation.marks[1:]), operation.ended]
    for (at, doing), end in zip(operation.marks, ends, strict=True):
        if doing != kind and end - at >= _SHORT:
            yield kind, start, at
            start, kind = at, doing
    yield kind, start, operation.ended
