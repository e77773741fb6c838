"""The `Work` objects that collectives return, on which a caller waits.

Rules, each found by experiment (torch 2.13):

* C++ (DDP, functional collectives) calls only `wait` and `get_future` of a Work that is written in
  Python. Python callers use the rest.
* The value of the future is the list of tensors. It is never None, and never an exception set with
  `set_exception`: DDP takes either for tensors and the process crashes. An error is raised instead:
  from the method, from `wait`, or inside a callback given to `then`.
* Creating a Work costs 0.5 us, a future 2 us. So a synchronous call that has succeeded returns the
  one shared `DONE`, and a future is created only on request.

```
DONE       the operation has finished; its tensors are not available from the Work
Done       the operation has finished; its future carries the tensors
Underway   base of operations that may still fail; keeps the error
Later      one or several parts under way; when they have finished, the first caller that waits
           or asks runs `finish` (a copy, a division) once
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

# torch's value for "the timeout of the group".
NO_TIMEOUT = timedelta(0)


class Done(Work):
    """A finished operation."""

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
    """Return a future that already has its value."""
    future: Future[Any] = Future()
    future.set_result(tensors)
    return future


class Underway(Done):
    """An operation that may still fail.

    The error is kept for later calls; a subclass implements how to wait, and when it has finished.
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
    """Parts that are under way, and the work of this process after they have finished.

    Parts are Works of Gloo or of this package. No thread runs in the background for them: `finish`
    runs in the caller that waits, in the one that asks, or in the callback of the future. As in
    torch's contract, a Work that no caller waits for is never finished.
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
        # torch's "not set" is negative.
        self._timeout = max(timeout, NO_TIMEOUT)
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for part in self._parts:
            try:
                part.wait(timeout or self._timeout)
            except BaseException as error:
                # If the part is still under way, only the caller's timeout has expired.
                if part.is_completed():
                    self._error = error
                raise
        self._end()
        return True

    def _end(self) -> None:
        """Run `finish` once after all parts; a second thread waits at the lock until it is done."""
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
            # Raises the error of the part, if it failed.
            part.value()
        self._end()
        return self._tensors

    def is_completed(self) -> bool:
        if self._error is not None:
            return True
        if not all(part.is_completed() for part in self._parts):
            return False
        # The error is kept for `exception` and `wait`.
        with contextlib.suppress(Exception):
            self.wait()
        return True


class Transfer(Later):
    """One send or receive of Gloo.

    Gloo's own Work for these has no future, reports "not completed" until a caller has waited, and
    must be waited for exactly once. So the first call that must not block (`is_completed`,
    `get_future`) starts a thread that waits; later callers of `wait` block until that thread is
    done.
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
