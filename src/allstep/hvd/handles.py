"""The engine as the front-ends see it: failures between ranks raise HorovodInternalError."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allstep import engine
from allstep.engine import Engine, Request
from allstep.errors import CommError
from allstep.hvd.exceptions import HorovodInternalError
from allstep.hvd.place import NOT_INITIALIZED


def enqueue(request: Request) -> int:
    """Submit a request and return a handle for `synchronize`. Never wait for other ranks."""
    try:
        return _running().enqueue(request)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def enqueue_group(requests: Sequence[Request]) -> int:
    """Submit several requests at once, under one handle."""
    try:
        return _running().enqueue_group(requests)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def perform(request: Request) -> Any:
    """Submit a request and return its result; faster than `enqueue` and `synchronize`."""
    try:
        return _running().perform(request)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def perform_group(requests: Sequence[Request]) -> tuple[Any, ...]:
    """Submit several requests and return their results."""
    results: tuple[Any, ...] = synchronize(enqueue_group(requests))
    return results


def poll(handle: int) -> bool:
    """Return whether `synchronize` would return at once. Raise ValueError for an unknown handle."""
    current = engine.current()
    if current is None:
        raise ValueError(
            f"handle {handle} was not created or has been cleared: Horovod is not running"
        )
    return current.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for the result of an operation and release its handle.

    Return None for an unknown handle.
    """
    current = engine.current()
    if current is None:
        return None
    try:
        return current.synchronize(handle)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def _running() -> Engine:
    current = engine.current()
    if current is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return current


class Unfinished(Mapping[int, Any]):
    """The handles without `synchronize` so far, as Horovod's `mpi_ops._handle_map`. Read-only."""

    def __getitem__(self, handle: int) -> Any:
        return self._handles()[handle]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._handles()))

    def __len__(self) -> int:
        return len(self._handles())

    def _handles(self) -> Mapping[int, Any]:
        current = engine.current()
        return {} if current is None else current.handles


_handle_map = Unfinished()
