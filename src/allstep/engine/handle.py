"""What a caller waits for: a handle, for one operation or for several that were handed over
together."""

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import torch

from allstep.engine.request import Request


class Sleeper:
    """One thread that sleeps until it is woken, once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def sleep(self, seconds: float) -> None:
        """Until woken, at most so long."""
        self._lock.acquire(timeout=seconds)

    def wake(self) -> None:
        """Twice does no harm."""
        with contextlib.suppress(RuntimeError):
            self._lock.release()


class Handle:
    """is_done: all of its operations are over, with results or an error. sleeper: a caller who is
    to be woken then."""

    __slots__ = ("_left", "error", "is_done", "is_group", "results", "sleeper")

    def __init__(self, num_operations: int = 1, is_group: bool = False) -> None:
        self.results: list[Any] = [None] * num_operations
        self.is_group = is_group
        self.is_done = num_operations == 0
        self.error: BaseException | None = None
        self.sleeper: Sleeper | None = None
        self._left = num_operations

    def put(self, index: int, result: Any = None, error: BaseException | None = None) -> None:
        """One of them is over."""
        self.results[index] = result
        self.error = self.error or error
        self._left -= 1
        if self._left == 0:
            self.is_done = True
            if self.sleeper is not None:
                self.sleeper.wake()

    def value(self) -> Any:
        """The result; of a group, a tuple of them. Raises what went wrong."""
        if self.error is not None:
            raise self.error
        return tuple(self.results) if self.is_group else self.results[0]


@dataclass(slots=True)
class Pending:
    """An operation between request and result: number `index` of its handle. ready: when the GPU
    has made its tensor."""

    request: Request
    handle: Handle
    index: int
    ready: Any = None

    def __post_init__(self) -> None:
        tensor = self.request.tensor
        if tensor is not None and tensor.is_cuda:
            self.ready = torch.cuda.current_stream(tensor.device).record_event()

    def wait_for_gpu(self) -> Request:
        if self.ready is not None:
            self.ready.synchronize()
        return self.request

    def put(self, result: Any = None, error: BaseException | None = None) -> None:
        self.handle.put(self.index, result, error)
