"""Gloo under the eyes of the group's guard: its connections, and the operations over them."""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from torch.futures import Future

from allstep.comm.failure import Operation
from allstep.comm.gloo import GlooMover
from allstep.comm.guard import Guard
from allstep.comm.plan import words, words_of_any
from allstep.comm.sockets import found
from allstep.comm.work import NO_TIMEOUT, Done
from allstep.errors import CollectiveTimeout
from allstep.limits import read_limits

_TRANSFERS = ("send", "recv", "recv_any")


def connected(
    store: Store, rank: int, size: int, timeout: timedelta, guard: Guard, ranks: Sequence[int] = ()
) -> GlooMover:
    """A Gloo group whose connections the guard watches over. ranks: what its ranks are in the guard's group, where they differ."""
    limits = read_limits()
    gloo, sockets = found(
        lambda: ProcessGroupGloo(store, rank, size, timeout=timeout), store, rank, size, limits.start, limits.lost
    )
    guard.watch_over(sockets, ranks)
    mover = GlooMover(gloo)
    mover.set_timeout(timeout)  # until here it was for connecting
    return mover


def guarded(guard: Guard, move: Callable[..., Any], name: str, *args: Any) -> Work:
    """Start an operation of a mover. On a group that has failed it raises at once."""
    number = 0 if name in _TRANSFERS else guard.begun
    operation = Operation(lambda: _said(name, args, guard.names), number)
    guard.check(operation)
    try:
        work: Work = move(*args)
    except RuntimeError as error:  # Gloo's word for a wrong argument as well as for a lost peer
        if guard.any_closed():
            raise guard.explain(error, operation) from error
        raise
    return Guarded(work, guard, operation)


def _said(name: str, args: Sequence[Any], names: Sequence[int]) -> str:
    if name not in _TRANSFERS:
        return words_of_any(name, args)
    tensor = args[0]
    peer = {"send": ", to ", "recv": ", from "}.get(name)
    return words(name, tensor.dtype, tensor.shape, more=f"{peer}{names[args[1]]}" if peer else "")


class Guarded(Done):
    """The Work of such an operation. An error of Gloo ends the group and is raised as what it means: `PeerLost`, for one."""

    def __init__(self, inner: Work, guard: Guard, operation: Operation) -> None:
        super().__init__()
        self._inner = inner
        self._guard = guard
        self._operation = operation
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if self._error is not None:
            raise self._error
        try:
            with self._guard.waiting(self._operation):
                self._wait(timeout)
        except CollectiveTimeout as error:
            if self._guard.failure is not None:
                self._error = error
            raise
        except BaseException as error:
            self._error = error
            raise
        return True

    def _wait(self, timeout: timedelta) -> None:
        try:
            self._inner.wait(timeout)
        except RuntimeError as error:
            if timeout and self._guard.failure is None and not self._inner.is_completed():
                said = f"{self._operation}: not over after the {timeout.total_seconds():.1f} s that `wait` was given"
                raise CollectiveTimeout(said, rank=self._guard.names[self._guard.rank]) from error
            raise

    def get_future(self) -> Future[Any]:
        self._operation.begin()
        self._guard.begin(self._operation)
        return self._inner.get_future().then(self._called_back)

    def _called_back(self, inner: Future[Any]) -> Any:
        self._guard.end(self._operation)
        try:
            return inner.value()
        except RuntimeError as error:
            self._error = self._guard.explain(error, self._operation)
            raise self._error from error

    def result(self) -> list[Tensor]:
        return self._inner.result()

    def is_completed(self) -> bool:
        if self._error is None:
            if not self._inner.is_completed():
                return False
            with contextlib.suppress(Exception):  # kept for `exception` and `wait`
                self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Any:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._inner.source_rank()
