"""The engine as the torch front-end sees it: what goes wrong between ranks comes out as
HorovodInternalError."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allstep import engine
from allstep.engine import Engine, Request
from allstep.errors import CommError
from allstep.hvd.exceptions import HorovodInternalError
from allstep.hvd.place import NOT_INITIALIZED


def ask(request: Request) -> int:
    """Hand over a request; a handle for `synchronize`. Never waits for other ranks."""
    try:
        return _running().enqueue(request)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def ask_group(requests: Sequence[Request]) -> int:
    """Hand over several at once, under one handle."""
    try:
        return _running().enqueue_group(requests)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def perform(request: Request) -> Any:
    """The result of a request; quicker than asking first and waiting then."""
    try:
        return _running().perform(request)
    except CommError as error:
        raise HorovodInternalError(str(error)) from error


def perform_group(requests: Sequence[Request]) -> tuple[Any, ...]:
    """The results of several, one for each."""
    results: tuple[Any, ...] = synchronize(ask_group(requests))
    return results


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once. ValueError for a handle that is not in use."""
    current = engine.current()
    if current is None:
        raise ValueError(
            f"handle {handle} was not created or has been cleared: Horovod is not running"
        )
    return current.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for the result and free the handle. None for a handle that is not in use."""
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
    """The handles that nobody has waited for yet, as Horovod's `mpi_ops._handle_map`: to look at,
    not to change."""

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
