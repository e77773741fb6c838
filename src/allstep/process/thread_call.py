"""Runs a call in another thread and returns what it returns, or raises what it raises.

For calls that may never return (a name server, a server that sends a byte a minute, a C++ library
that waits for a dead peer): the caller waits for a bounded time, or until it knows a reason to
stop, and leaves the thread behind. Threads are daemons, so they do not hold up the process.

```
call_within(act, seconds)    one call in a thread of its own; TimeoutError when it is late
CallThread                   one thread for many calls, one after the other (20 us for each)
Call                         a call to be run by some thread, and its result
```
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

Result = TypeVar("Result")


class Call(Generic[Result]):
    """A call that one thread runs and another waits for."""

    __slots__ = ("_act", "_outcome", "_reply")

    def __init__(self, act: Callable[[], Result]) -> None:
        self._act: Callable[[], Result] | None = act
        self._reply: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._outcome: tuple[Any, BaseException | None] | None = None

    def run(self) -> None:
        """Make the call and keep what came of it. What the call refers to is let go of."""
        act, self._act = self._act, None
        assert act is not None, "a call is run once"
        try:
            self._reply.put((act(), None))
        except BaseException as error:
            self._reply.put((None, error))

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end of the call, None: for ever; return whether it has ended.

        For one thread.
        """
        if self._outcome is None:
            try:
                self._outcome = self._reply.get(timeout=seconds)
            except queue.Empty:
                return False
        return True

    def result(self, seconds: float | None = None) -> Result:
        """Return or raise what the call did; NotBack when it has not ended in time."""
        if not self.wait(seconds):
            raise NotBack(f"not back within {seconds:.1f} s")
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return cast(Result, value)


class NotBack(TimeoutError):
    """A call that has not ended in time. A TimeoutError that the call itself raised is none."""


class CallThread:
    """A thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, act: Callable[[], Result]) -> Call[Result]:
        """Have `act` called after those started before; return where its result will be."""
        call = Call(act)
        self._calls.put(call)
        return call

    def end(self) -> None:
        """End the thread, when no call is under way."""
        self._calls.put(None)
        self._thread.join(1.0)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # what the call returned is not ours to keep


def call_within(act: Callable[[], Result], seconds: float, name: str) -> Result:
    """Return or raise what `act` does, in a thread with this name; NotBack when it takes longer.

    The thread of a late call is left behind.
    """
    call = Call(act)
    threading.Thread(target=call.run, name=name, daemon=True).start()
    return call.result(seconds)
