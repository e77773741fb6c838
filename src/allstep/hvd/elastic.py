"""The common part of elastic training for every framework: a state that can be saved, restored and
broadcast, and the loop that runs a training function again after the world has changed.

```
   .---------------------------------------------------------------------.
   v                                                                     |
  callbacks -> agree, sync -> function(state) -- a failure -----> restore, reset
                                 |           `-- hosts updated ---------> reset
                                 v
                               result
```

In a fixed world only commit, restore and sync have an effect: hosts never change, so the
notification manager reports nothing, and a lost rank makes the reset fail with an error that names
the rank. In an elastic run (`--min-np`) the reset joins the next world, and the launcher's requests
reach the notification manager. A failure is a HorovodInternalError, a CommError, or an error of a
framework in place of one (`kept_errors`). Reset is `shutdown` and `init`. Ranks that disagree
(CollectiveMismatch) in the same way after a reset have a bug: the second error is raised.
"""

import functools
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Protocol

from allstep import faults
from allstep.comm.group.init import needs_sync, report_updates, requested_changes
from allstep.comm.health.generation_end import on_change
from allstep.errors import CollectiveMismatch, CommError
from allstep.hvd import kept_errors
from allstep.hvd.basics import init, shutdown
from allstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from allstep.hvd.objects import allgather_object
from allstep.hvd.place import is_initialized, size


class HostUpdateResult(IntFlag):
    """The change of the hosts of a job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


_RESULTS = {
    "grow": HostUpdateResult.added,
    "shrink": HostUpdateResult.removed,
    "mixed": HostUpdateResult.mixed,
}


class Listener(Protocol):
    """An object that is notified when hosts are added or removed."""

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None: ...


class NotificationManager:
    """Forwards host changes from the launcher to listeners, on a thread of its own."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self._last_time = 0

    def register_listener(self, listener: Listener) -> None:
        """Notify this listener of host changes."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop notifying this listener."""
        self._listeners.discard(listener)

    def note_change(self, kind: str) -> None:
        """Notify all listeners of a request of the launcher: "grow", "shrink" or "mixed"."""
        # States ignore a change whose time, in whole seconds, is not later than that of the last.
        self._last_time = max(int(time.time()), self._last_time + 1)
        self.handle_hosts_updated(self._last_time, _RESULTS[kind])

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Notify all listeners of a host change."""
        for listener in tuple(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)

    def repeat_changes(self) -> None:
        """Notify all listeners again of the requests to leave the world that was just joined.

        They may have arrived before a state listened, or before it dropped those of the old world.
        """
        for kind in requested_changes():
            self.note_change(kind)


notification_manager = NotificationManager()
on_change(notification_manager.note_change)


class _Commits:
    """Counts the commits of this process, with those before it joined; the launcher compares."""

    number = 0

    def take(self, number: int) -> None:
        """Set the number, and report it to the launcher of an elastic run."""
        self.number = number
        report_updates(number)


_commits = _Commits()


class State(ABC):
    """The values that must survive a change of the world.

    `bcast_object`: returns rank 0's object on all ranks. `get_rank`: returns the current rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call in this order after each reset.

        For values that depend on the number of ranks, such as a learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Drop notifications about the old world, reset, and run the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Queue a host change for the next commit; called by the notification manager."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and check for host changes. A collective: all ranks commit together."""
        if faults.active is not None:
            faults.active.at_commit()
        self.save()
        _commits.take(_commits.number + 1)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 was notified of a change.

        A collective.
        """
        newest, flags = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > newest:
                newest = timestamp
                flags |= HostUpdateResult(update)
        before, self._last_updated_timestamp, agreed = self._bcast_object(
            (self._last_updated_timestamp, newest, int(flags))
        )
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(agreed == HostUpdateResult.removed)

    @abstractmethod
    def save(self) -> None:
        """Save a copy in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Return to the last saved copy."""

    @abstractmethod
    def sync(self) -> None:
        """Take over rank 0's state. A collective."""

    # Not abstract, since most states have nothing to do here.
    def reset(self) -> None:  # noqa: B027
        """Prepare for the new world, before the callbacks."""


class ObjectState(State):
    """A state of plain attributes, one for each keyword.

    A copy holds the same objects: replace values, do not change them in place.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._write(kwargs)

    def save(self) -> None:
        """Save the current values."""
        self._saved_state = self._now()

    def restore(self) -> None:
        """Return to the saved values."""
        self._write(self._saved_state)

    def sync(self) -> None:
        """Take over rank 0's current values, and save them for `restore`."""
        if self._saved_state:
            self._write(self._bcast_object(self._now()))
        self.save()

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function `func(state, ...)`, so that it survives changes of the world.

    It starts with rank 0's state on all ranks, and starts again after the world has changed.
    """
    return run_fn(func, _rejoin)


def _rejoin() -> None:
    shutdown()
    init()


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return `func(state, ...)` with a loop that runs it again after the world failed or changed.

    `reset`: leaves the old world and joins the new one.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        turn = functools.partial(func, state, *args, **kwargs)
        notification_manager.register_listener(state)
        try:
            change = _Change()
            while (ended := _run_once(state, turn, change)).change is not None:
                change = ended.change
                reset()
            return ended.result
        finally:
            notification_manager.remove_listener(state)

    return wrapper


@dataclass(frozen=True)
class _Change:
    """Why this process enters another world.

    keeps_state: its state is that of the others. mismatch: the disagreement that ended the last
    one, with the number of commits before it.
    """

    is_reset: bool = False
    keeps_state: bool = False
    mismatch: tuple[str, int] | None = None


@dataclass(frozen=True)
class _Ended:
    """How one call of the function ended: with a result, or because the world changed."""

    change: _Change | None = None
    result: Any = None


def _run_once(state: State, turn: Callable[[], Any], last: _Change) -> _Ended:
    """Prepare the state for this world and call the function, as `turn`.

    A rank can be lost at any point, also while the callbacks run or the state is sent.
    """
    try:
        if last.is_reset:
            state.on_reset()
        notification_manager.repeat_changes()
        _sync_if_needed(state, not last.keeps_state or needs_sync())
        return _Ended(result=turn())
    except HostsUpdatedInterrupt as interrupt:
        return _Ended(_Change(is_reset=True, keeps_state=interrupt.skip_sync))
    except Exception as error:
        # A framework may have replaced our error by one of its own.
        known = kept_errors.original(error) or error
        if not _is_failure(known) or _is_repeated(known, last):
            if known is error:
                raise
            raise known from error
        state.restore()
        kept_errors.forget()
        return _Ended(_Change(is_reset=True, mismatch=_mismatch_of(known)))


def _sync_if_needed(state: State, is_needed: bool) -> None:
    """Take over rank 0's state if a rank needs that, and its number of commits.

    The ranks agree first: one may have left the old world in order, another one by an error.
    """
    requests = [(is_needed, _commits.number)]
    if is_initialized() and size() > 1:
        requests = allgather_object(requests[0], "elastic.sync")
    if any(is_needed for is_needed, _ in requests):
        state.sync()
        _commits.take(requests[0][1])


def _is_failure(error: Exception) -> bool:
    """Return whether a collective failed.

    CommError comes from norms and the user's own groups, which bypass the engine.
    """
    return isinstance(error, (HorovodInternalError, CommError))


def _is_repeated(failure: Exception, last: _Change) -> bool:
    """Return whether the ranks disagree as they did before the reset, which does not help then."""
    mismatch = _mismatch_of(failure)
    return mismatch is not None and mismatch == last.mismatch


def _mismatch_of(failure: Exception) -> tuple[str, int] | None:
    """Return the text of a disagreement and the number of commits before it; None for others."""
    causes = failure, failure.__cause__
    is_mismatch = any(isinstance(each, CollectiveMismatch) for each in causes)
    return (str(failure), _commits.number) if is_mismatch else None
