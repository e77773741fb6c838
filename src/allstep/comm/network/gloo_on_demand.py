"""A Gloo group that is connected when an operation first needs it.

In an elastic run the ranks of one host use shared memory for almost everything, and Gloo would be
connected again in each generation for nothing. So it is connected at the first operation that
shared memory declines.

All ranks must connect together, but not all of them call that operation: a transfer concerns two
ranks. A rank that needs Gloo sets a flag in shared memory, and the watch thread of every other rank
(`Guard.look`) then connects, in a thread, whatever its program does. So the first operation takes
up to half a second, once in a generation.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from allstep.comm.health.failure import Operation
from allstep.comm.health.guard import Guard
from allstep.comm.network.gloo import GlooTransport

_LOOK_SECONDS = 0.05


class Wish(Protocol):
    """Memory that the ranks of a host share, in which one can ask the others to connect."""

    def ask_for_network(self) -> None: ...

    def is_network_wanted(self) -> bool: ...


class GlooOnDemand:
    """A transport with the operations of `GlooTransport`, which connects at the first one.

    connect: connects to all ranks and returns the transport; called once, in a thread.
    """

    def __init__(self, connect: Callable[[], GlooTransport], guard: Guard, wish: Wish) -> None:
        self._connect, self._guard, self._wish = connect, guard, wish
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_begun = self._is_closed = False
        self._made: GlooTransport | None = None
        self._error: BaseException | None = None
        self._timeout: timedelta | None = None
        guard.on_look = self._look

    def __getattr__(self, name: str) -> Any:
        """Return an operation of the transport; calling it connects."""
        return partial(self._run, name)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that a collective may take from now on."""
        self._timeout = timeout
        if self._made is not None:
            self._made.set_timeout(timeout)

    def close(self) -> None:
        """Connect no more: the group is shut down."""
        with self._lock:
            self._is_closed = True
        self._guard.on_look = None

    def _run(self, name: str, *args: Any) -> Any:
        return getattr(self._get(), name)(*args)

    def _get(self) -> GlooTransport:
        """Return the transport, once all ranks have connected."""
        if self._made is None:
            self._wish.ask_for_network()
            self._begin()
            check = self._guard.check_for("connecting the ranks over Gloo")
            while not self._ended.wait(_LOOK_SECONDS):
                check()
            self._guard.check(Operation("connecting the ranks over Gloo"))
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def _look(self) -> None:
        if not self._is_begun and self._wish.is_network_wanted():
            self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._is_begun or self._is_closed:
                return
            self._is_begun = True
        threading.Thread(target=self._make, name="allstep-connect", daemon=True).start()

    def _make(self) -> None:
        try:
            made = self._connect()
            if self._timeout is not None:
                made.set_timeout(self._timeout)
            self._made = made
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
