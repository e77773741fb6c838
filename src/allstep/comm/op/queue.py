"""The order of the operations of one group, and the threads that run them.

Operations of a group run one after the other, in the order of the calls, so all ranks run the same
operation at the same time. A synchronous call runs in the calling thread, at once. An asynchronous
call (`async_op=True`, DDP's buckets) is appended to a queue. A thread of the group, started at the
first asynchronous call, runs the queued operations; a caller that waits for one runs the queue
itself instead of waiting for the thread. The thread sleeps while the queue is empty and never spins
with the interpreter lock held. It ends with `close`.

With ALLSTEP_DEBUG=1 a queued operation stores the line of the program that called it, for error
messages; that costs about 10 us.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.futures import Future

from allstep.comm.health.stack_lines import called_from, callers_line
from allstep.comm.op.work import NO_TIMEOUT, Underway
from allstep.errors import CommError

_LAST_SECONDS = 1.0


class Queue:
    """The operations of a group, run in the order of their calls."""

    def __init__(self) -> None:
        self._line: deque[QueuedWork] = deque()
        # Held by the thread that runs an operation.
        self._turn = threading.Lock()
        self._something = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._debug = os.environ.get("ALLSTEP_DEBUG") == "1"

    def now(self, act: Callable[..., None], *args: Any) -> None:
        """Run an operation in this thread, after all queued ones."""
        with self._turn:
            if self._is_closed:
                raise CommError("an operation on a group that has been shut down")
            if self._line:
                self._carry_out_line()
            act(*args)

    def later(self, act: Callable[[], None], tensors: Sequence[Tensor]) -> "QueuedWork":
        """Append an operation to the queue and return its Work."""
        if self._is_closed:
            raise CommError("an operation on a group that has been shut down")
        work = QueuedWork(self, act, tensors, callers_line() if self._debug else "")
        self._line.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="allstep-queue", daemon=True)
            self._thread.start()
        self._something.release()
        return work

    def drive(self) -> None:
        """Run all queued operations; wait for the thread that is running one."""
        with self._turn:
            self._carry_out_line()

    def close(self) -> bool:
        """End the thread after the queued operations; return whether no operation runs any more.

        They must have finished, or fail without help: this waits 1 s for them.
        """
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._something.release()
            thread.join(_LAST_SECONDS)
        is_at_rest = self._turn.acquire(timeout=_LAST_SECONDS)
        if is_at_rest:
            self._turn.release()
        return is_at_rest

    def _carry_out_line(self) -> None:
        while self._line:
            self._line.popleft().carry_out()

    def _serve(self) -> None:
        while not self._is_closed:
            self._something.acquire()
            if self._line:
                self.drive()


class QueuedWork(Underway):
    """The Work of a queued operation."""

    def __init__(
        self, queue: Queue, act: Callable[[], None], tensors: Sequence[Tensor], line: str
    ) -> None:
        super().__init__(tensors)
        self._queue = queue
        self._act: Callable[[], None] | None = act
        self._line = line
        self._over = False
        self._promised: Future[Any] | None = None
        self._promising = threading.Lock()

    def carry_out(self) -> None:
        """Run the operation and keep its error. Called once, with the queue's lock held."""
        assert self._act is not None
        try:
            with called_from(self._line):
                self._act()
        except BaseException as error:
            self._error = error
        self._act = None
        with self._promising:
            self._over = True
            promised = self._promised
        if promised is not None:
            promised.set_result(None)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self._over:
            self._queue.drive()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors.

        An error is raised in a callback of the future, because DDP would take an exception that is
        set as its value for tensors.
        """
        first: Future[Any] = Future()
        with self._promising:
            over = self._over
            if not over:
                if self._promised is None:
                    self._promised = first
                first = self._promised
        if over:
            first.set_result(None)
        return first.then(self._value)

    def _value(self, _: Future[Any]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def is_completed(self) -> bool:
        return self._over
