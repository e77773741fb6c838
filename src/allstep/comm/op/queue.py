"""The order of the operations of one group, and who carries them out.

Operations of a group run one after the other, in the order in which they were called: all ranks
then do the same thing at the same time. A call that waits is carried out by the caller itself, at
once. One that does not wait (`async_op=True`, DDP's buckets) is put in line; a thread of the group,
started when it is first needed, carries out what stands there, unless somebody comes to wait and
does it himself: whoever waits drives. The thread sleeps when the line is empty and never spins with
the interpreter held. It ends with `close`.

With ALLSTEP_DEBUG=1 an operation in line remembers which line of the program called it, for
messages about it; that costs some 10 us.
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


class Queue:
    """Operations in the order of their calls."""

    def __init__(self) -> None:
        self._line: deque[QueuedWork] = deque()
        self._turn = threading.Lock()  # held by whoever carries out an operation
        self._something = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._debug = os.environ.get("ALLSTEP_DEBUG") == "1"

    def now(self, act: Callable[..., None], *args: Any) -> None:
        """Carry out an operation, after all that stand in line."""
        with self._turn:
            if self._line:
                self._carry_out_line()
            act(*args)

    def later(self, act: Callable[[], None], tensors: Sequence[Tensor]) -> "QueuedWork":
        """Put an operation in line."""
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
        """Carry out all that stand in line; wait for whoever is at it."""
        with self._turn:
            self._carry_out_line()

    def close(self) -> None:
        """End the thread, after the operations in line.

        Those must be over, or fail by themselves: it waits a second for them.
        """
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._something.release()
            thread.join(1.0)

    def _carry_out_line(self) -> None:
        while self._line:
            self._line.popleft().carry_out()

    def _serve(self) -> None:
        while not self._is_closed:
            self._something.acquire()
            if self._line:
                self.drive()


class QueuedWork(Underway):
    """An operation that is carried out later."""

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
        """Called once, by whoever's turn it is."""
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
        """The value, or the error: raised in a callback, since DDP would take an exception put into
        a future for tensors."""
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
