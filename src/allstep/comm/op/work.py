"""What a collective hands back: a `Work` that can be waited for.

Rules, each found by experiment (torch 2.13):

* C++ (DDP, functional collectives) calls only `wait` and `get_future` of a Work that is written in
  Python. Python callers use the rest.
* The value of the future is the list of tensors. Never None, and never an exception put there with
  `set_exception`: DDP takes either for tensors and the process crashes. An error is raised: from
  the method, from `wait`, or inside a callback given to `then`.
* Making a Work costs 0.5 us, a future 2 us. So a synchronous call that has succeeded returns the
  one shared `DONE`, and a future is made when somebody asks for it.

```
DONE       the operation is over; nobody will ask for its tensors
Done       the operation is over; its future carries the tensors
Underway   what may still fail, and keeps its error
Later      under way in one or several parts; when they are through, `finish` (a copy, a division) runs once, for whoever looks first
Transfer   a send or receive of Gloo under way
```
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

NO_TIMEOUT = timedelta(0)  # torch's way to say: as long as the group allows


class Done(Work):
    """An operation that is over."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return completed(self._tensors)

    def result(self) -> list[Tensor]:
        return self._tensors

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def source_rank(self) -> int:
        raise RuntimeError("only a receive from any rank has a source rank")

    def _source_rank(self) -> int:
        return self.source_rank()


DONE = Done()


def completed(tensors: list[Tensor]) -> Future[Any]:
    """A future that has its value."""
    future: Future[Any] = Future()
    future.set_result(tensors)
    return future


class Underway(Done):
    """An operation that may still fail.

    The error is kept for whoever asks later; a subclass says how it waits and when it is over.
    """

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(tensors)
        self._error: BaseException | None = None

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def synchronize(self) -> None:
        self.wait()


class Later(Underway):
    """Parts that are under way, and what is left to do in this process when they are through.

    Parts are Works of Gloo or our own. Nothing runs in the background on their behalf: whoever
    waits, asks or is called back by the future runs `finish`. A Work that nobody waits for is never
    finished, as torch's contract has it.
    """

    def __init__(
        self,
        parts: Sequence[Work],
        tensors: Sequence[Tensor],
        finish: Callable[[], None] | None = None,
        timeout: timedelta = NO_TIMEOUT,
    ) -> None:
        super().__init__(tensors)
        self._parts = parts
        self._finish = finish
        self._timeout = max(timeout, NO_TIMEOUT)  # torch's "not set" is negative
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for part in self._parts:
            try:
                part.wait(timeout or self._timeout)
            except BaseException as error:
                if (
                    part.is_completed()
                ):  # else the caller's patience is over, and the operation is not
                    self._error = error
                raise
        self._end()
        return True

    def _end(self) -> None:
        """Parts are through: do what is left, once.

        The lock makes a second thread wait until it is done.
        """
        with self._lock:
            if self._finish is not None:
                with torch.no_grad():
                    self._finish()
            self._finish, self._parts = None, ()

    def get_future(self) -> Future[Any]:
        parts = [part.get_future() for part in self._parts]
        if not parts:
            self._end()
            return completed(self._tensors)
        return torch.futures.collect_all(parts).then(self._called_back)

    def _called_back(self, parts: Future[list[Future[Any]]]) -> list[Tensor]:
        for part in parts.value():
            part.value()  # raises what went wrong
        self._end()
        return self._tensors

    def is_completed(self) -> bool:
        if self._error is not None:
            return True
        if not all(part.is_completed() for part in self._parts):
            return False
        with contextlib.suppress(Exception):  # kept for `exception` and `wait`
            self.wait()
        return True


class Transfer(Later):
    """One send or receive of Gloo.

    Gloo's own Work for these has no future, says "not completed" until somebody has waited, and
    must be waited for exactly once. So the first who asks without wanting to wait (`is_completed`,
    `get_future`) starts a thread that does; later callers join it.
    """

    def __init__(
        self,
        inner: Work,
        tensor: Tensor,
        timeout: timedelta,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__((), (tensor,), finish, timeout)
        self._inner = inner
        self._turn = threading.Lock()
        self._over = False
        self._waiter: threading.Thread | None = None
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        with self._turn:
            if not self._over:
                self._wait_for_gloo(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_gloo(self, timeout: timedelta) -> None:
        try:
            self._inner.wait(timeout or self._timeout)
            self._end()
        except BaseException as error:
            self._error = error
        self._over = True

    def _start_waiter(self) -> None:
        if self._waiter is None and not self._over:
            self._waiter = threading.Thread(
                target=self._wait_once, name="allstep transfer", daemon=True
            )
            self._waiter.start()

    def _wait_once(self) -> None:
        with self._turn:
            if not self._over:
                self._wait_for_gloo(NO_TIMEOUT)

    def is_completed(self) -> bool:
        if not self._over:
            self._start_waiter()
        return self._over

    def get_future(self) -> Future[Any]:
        if self._future is None:
            first: Future[Any] = Future()
            self._future = first.then(self._value)
            threading.Thread(
                target=self._fulfil, args=(first,), name="allstep transfer", daemon=True
            ).start()
        return self._future

    def _fulfil(self, future: Future[Any]) -> None:
        self._wait_once()
        future.set_result(None)

    def _value(self, _: Future[Any]) -> list[Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return self._inner.source_rank()
