"""Runs a call in another thread, and returns or raises its outcome in the calling thread.

For calls that may never return (a name server, a server that sends a byte a minute, a C++ library
that waits for a dead peer): the caller waits for a bounded time, or until it knows a reason to
stop, and abandons the thread. Threads are daemons, so they do not delay the end of the process.

```
call_within(act, seconds)    one call in a thread of its own; CallTimeout after `seconds`
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
        """Make the call, store its outcome, and drop the reference to the callable."""
        act, self._act = self._act, None
        assert act is not None, "a call is run once"
        try:
            self._reply.put((act(), None))
        except BaseException as error:
            self._reply.put((None, error))

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end of the call, `seconds` at most (None: no limit); return if it has ended.

        Only one thread may wait for a call.
        """
        if self._outcome is None:
            try:
                self._outcome = self._reply.get(timeout=seconds)
            except queue.Empty:
                return False
        return True

    def result(self, seconds: float | None = None) -> Result:
        """Return or raise the outcome of the call; CallTimeout if it has not ended in `seconds`."""
        if not self.wait(seconds):
            raise CallTimeout(f"the call did not return within {seconds:.1f} s")
        assert self._outcome is not None
        value, error = self._outcome
        if error is not None:
            raise error
        return cast(Result, value)


class CallTimeout(TimeoutError):
    """The call has not ended in time. Differs from a TimeoutError that the call itself raises."""


class CallThread:
    """A thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, act: Callable[[], Result]) -> Call[Result]:
        """Queue a call of `act` behind those started before; return the `Call` for its result."""
        call = Call(act)
        self._calls.put(call)
        return call

    def end(self) -> None:
        """End the thread after the queued calls; wait for that at most 1 s."""
        self._calls.put(None)
        self._thread.join(1.0)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            # This frame must not keep the result of the call alive.
            del call


def call_within(act: Callable[[], Result], seconds: float, name: str) -> Result:
    """Call `act` in a thread called `name` and return or raise its outcome; CallTimeout if late.

    The thread of a call that timed out is abandoned.
    """
    call = Call(act)
    threading.Thread(target=call.run, name=name, daemon=True).start()
    return call.result(seconds)
