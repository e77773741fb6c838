"""Handles, which callers wait for: one per operation, or one per group of operations."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import torch

from allstep.engine.request import Request


class Sleeper:
    """Puts one thread to sleep until another thread wakes it; for one use."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, at most `seconds`."""
        self._lock.acquire(timeout=seconds)

    def wake(self) -> None:
        """Wake the thread; further calls have no effect."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


class Handle:
    """The results of one operation or of a group.

    `is_done`: all operations have finished, with results or an error. `sleeper`: a caller to wake
    then.
    """

    __slots__ = ("_left", "error", "is_done", "is_group", "results", "sleeper")

    def __init__(self, num_operations: int = 1, is_group: bool = False) -> None:
        self.results: list[Any] = [None] * num_operations
        self.is_group = is_group
        self.is_done = num_operations == 0
        self.error: BaseException | None = None
        self.sleeper: Sleeper | None = None
        self._left = num_operations

    def put(self, index: int, result: Any = None, error: BaseException | None = None) -> None:
        """Store the result or error of operation `index`; wake the caller after the last one."""
        self.results[index] = result
        self.error = self.error or error
        self._left -= 1
        if self._left == 0:
            self.is_done = True
            if self.sleeper is not None:
                self.sleeper.wake()

    def value(self) -> Any:
        """Return the result, or a tuple of results for a group.

        Raise the error of a failed operation.
        """
        if self.error is not None:
            raise self.error
        return tuple(self.results) if self.is_group else self.results[0]


@dataclass(slots=True)
class Pending:
    """An operation between request and result.

    `index`: its number within its handle. `ready`: the CUDA event after which its tensor is valid.
    """

    request: Request
    handle: Handle
    index: int
    ready: Any = None

    def __post_init__(self) -> None:
        tensor = self.request.tensor
        if tensor is not None and tensor.is_cuda:
            self.ready = torch.cuda.current_stream(tensor.device).record_event()

    def wait_for_gpu(self) -> Request:
        """Wait until the GPU has written the tensor; return the request."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.request

    def put(self, result: Any = None, error: BaseException | None = None) -> None:
        """Store the result or error in the handle."""
        self.handle.put(self.index, result, error)
