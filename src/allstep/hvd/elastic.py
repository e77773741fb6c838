"""Elastic training, the part that every framework shares: a state that can be saved, restored and
brought to all ranks, and the loop that runs a training function again after the world has changed.

```
             .--------------------------------------------------------------.
             v                                                              |
  sync -> function(state) -- HorovodInternalError ----> restore -----> reset: shutdown, init
             |           `-- HostsUpdatedInterrupt ---> keep --------'      then the reset callbacks
             v
           result
```

In a fixed world commit, restore and sync are all there is: no host ever comes or goes, so the
notification manager has nothing to tell, and a lost rank makes the reset fail with an error that
names it. When a launcher can replace ranks, it speaks to `notification_manager`, and nothing else
here changes.
"""

import functools
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any, Protocol

from allstep.errors import CommError
from allstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt


class HostUpdateResult(IntFlag):
    """What happened to the hosts of a job."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class Listener(Protocol):
    """Who wants to know that hosts came or went."""

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None: ...


class NotificationManager:
    """Hands on what the launcher tells about hosts.

    Called from another thread than the training's.
    """

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()

    def register_listener(self, listener: Listener) -> None:
        self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        for listener in tuple(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = NotificationManager()


class State(ABC):
    """What must survive a change of the world.

    bcast_object: brings rank 0's object to all ranks. get_rank: our rank now.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Called in this order after each reset; for what depends on the number of ranks, such as a
        learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world was made anew: what was said about the old one is void."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Called by the notification manager; the training hears of it at its next commit."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save, and see whether the hosts changed. A collective: all ranks commit together."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 was told of a change. A collective."""
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
        """Keep a copy to go back to, in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the last saved copy."""

    @abstractmethod
    def sync(self) -> None:
        """Take rank 0's state. A collective."""

    def reset(self) -> None:  # noqa: B027  # most states have nothing to do
        """After the world was made anew, before the callbacks."""


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
        self._saved_state = self._now()

    def restore(self) -> None:
        self._write(self._saved_state)

    def sync(self) -> None:
        """Rank 0's values as they are now; they are what a restore goes back to."""
        if self._saved_state:
            self._write(self._bcast_object(self._now()))
        self.save()

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """`func(state, ...)`, started again in a new world when the old one broke or changed. reset:
    leaves the old and joins the new."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.register_listener(state)
        skip_sync = False
        try:
            while True:
                try:
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except (
                    HorovodInternalError,
                    CommError,
                ):  # the latter from what talks past the engine: norms, the user's own groups
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper
