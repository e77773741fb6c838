"""Gloo with the group's guard: its connections are watched, and errors become failures."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work
from torch.futures import Future

from allstep.comm.health.failure import Operation
from allstep.comm.health.guard import Guard
from allstep.comm.health.helper_thread import call_in_thread
from allstep.comm.health.sockets import found
from allstep.comm.network.gloo import GlooTransport
from allstep.comm.op.describe import describe, describe_call
from allstep.comm.op.work import NO_TIMEOUT, Underway
from allstep.errors import CollectiveTimeout, CommError
from allstep.limits import read_limits

_TRANSFERS = ("send", "recv", "recv_any")


def connected(
    store: Store, rank: int, size: int, timeout: timedelta, guard: Guard, ranks: Sequence[int] = ()
) -> GlooTransport:
    """Return the transport of a new Gloo group whose connections the guard watches.

    `ranks` are the numbers of its ranks in the guard's group, where they differ.
    """
    limits = read_limits()
    gloo, sockets = found(
        lambda: ProcessGroupGloo(store, rank, size, timeout=timeout),
        store,
        rank,
        size,
        limits.start,
        limits.lost,
    )
    guard.watch_over(gloo, sockets, ranks)
    return GlooTransport(gloo, timeout)


def guarded(guard: Guard, move: Callable[..., Any], name: str, *args: Any) -> Work:
    """Start an operation of a transport; raise at once if the group has failed."""
    number = 0 if name in _TRANSFERS else guard.begun
    operation = Operation(lambda: _describe(name, args, guard.names), number, _limit(args[-1]))
    guard.check(operation)
    try:
        work: Work = move(*args)
    # Gloo raises this for a wrong argument as well as for a lost peer.
    except RuntimeError as error:
        if guard.any_closed():
            raise guard.explain(error, operation) from error
        raise
    return Guarded(work, guard, operation)


class _CallerTimeout(Exception):
    """The timeout that the caller of `wait` gave has expired."""


class Promise:
    """A future that is completed by Gloo or by the failure of the group, whichever is first."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        # Gloo's future; None if the group failed first.
        self.value: Future[Any] | None = None
        self._first = threading.Lock()

    def keep(self, value: Future[Any] | None = None) -> None:
        if self._first.acquire(blocking=False):
            self.value = value
            self.future.set_result(None)


def _limit(opts: Any) -> float | None:
    """Return the call's own timeout in seconds; None if not set, which torch writes as negative."""
    timeout = getattr(opts, "timeout", NO_TIMEOUT)
    return timeout.total_seconds() if timeout > NO_TIMEOUT else None


def _describe(name: str, args: Sequence[Any], names: Sequence[int]) -> str:
    if name not in _TRANSFERS:
        return describe_call(name, args)
    tensor = args[0]
    peer = {"send": ", to ", "recv": ", from "}.get(name)
    return describe(
        name, tensor.dtype, tensor.shape, more=f"{peer}{names[args[1]]}" if peer else ""
    )


class Guarded(Underway):
    """The Work of an operation over Gloo.

    An error of Gloo ends the group and is raised as its cause, such as `PeerLost`.
    """

    def __init__(self, inner: Work, guard: Guard, operation: Operation) -> None:
        super().__init__()
        self._inner = inner
        self._guard = guard
        self._operation = operation

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation has finished.

        After the caller's `timeout` raise `CollectiveTimeout`; the operation itself continues.
        """
        if self._error is not None:
            raise self._error
        until = time.monotonic() + timeout.total_seconds() if timeout else None
        try:
            with self._guard.waiting(self._operation):
                call_in_thread(self._inner.wait, lambda: self._check(until))
        except _CallerTimeout:
            seconds = timeout.total_seconds()
            message = f"{self._operation}: not finished within the {seconds:.1f} s given to `wait`"
            raise CollectiveTimeout(message, rank=self._guard.names[self._guard.rank]) from None
        except BaseException as error:
            self._error = error
            raise
        return True

    def _check(self, until: float | None) -> None:
        self._guard.check_while_waiting(self._operation)
        if until is not None and time.monotonic() > until:
            raise _CallerTimeout

    def get_future(self) -> Future[Any]:
        promise = Promise()
        self._operation.begin()
        self._operation.on_failure = promise.keep
        self._guard.begin(self._operation)
        self._inner.get_future().add_done_callback(promise.keep)
        return promise.future.then(lambda _: self._value(promise.value))

    def _value(self, inner: Future[Any] | None) -> Any:
        self._guard.end(self._operation)
        try:
            self._guard.check(self._operation)
            assert inner is not None
            return inner.value()
        except CommError as error:
            self._error = error
            raise
        except RuntimeError as error:
            self._error = self._guard.explain(error, self._operation)
            raise self._error from error

    def result(self) -> list[Tensor]:
        return self._inner.result()

    def is_completed(self) -> bool:
        if self._error is None:
            if self._guard.failure is None and not self._inner.is_completed():
                return False
            # The error is kept for `exception` and `wait`.
            with contextlib.suppress(Exception):
                self.wait()
        return True

    def source_rank(self) -> int:
        return self._inner.source_rank()
