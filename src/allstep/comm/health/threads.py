"""Two threads per process that look after its groups, started with the first of them and ended with
the last.

The *watch* ticks twice a second and asks each group to look at itself (`look`). Whatever talks to
the store may hang, when the store is on a host that is cut off; that is done by the *runner*. Who
sends it on an errand waits for a bounded time; if it does not come back it is left to itself, and
another takes its place. Between errands it goes its rounds (`round`).

Both are daemons. At exit they are stopped, because a thread that comes back from C++ into an
interpreter that is gone takes the process down with it. A forked process has neither: it forgets
the groups of its parent.
"""

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from allstep.process.thread_call import Call, CallTimeout

_LEAVE_SECONDS = 2.0
_MOST_WAIT = 5.0


class Group(Protocol):
    """What the two threads ask of a group."""

    @property
    def tick(self) -> float:
        """Seconds between looks that its limits need."""

    def look(self) -> None:
        """Must not hang."""

    def round(self) -> float:
        """May hang. Seconds until the next round."""

    def abandon(self) -> None:
        """The process ends now: whatever hangs must come back."""

    def leave(self) -> None:
        """The process ends. May hang."""


class Runner:
    """A thread for calls that may hang."""

    def __init__(self, rounds: Callable[[], float | None]) -> None:
        self._rounds = rounds
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.left_alone = False
        self.thread = threading.Thread(target=self._run, name="allstep-runner", daemon=True)
        self.thread.start()

    def send(self, act: Callable[[], Any], seconds: float) -> Any:
        """What `act` returns or raises; TimeoutError when it is not back in time."""
        call = Call(act)
        self._errands.put(call.run)
        try:
            return call.result(seconds)
        except CallTimeout:
            self.left_alone = True
            raise

    def wake(self) -> None:
        """Go the rounds now."""
        self._errands.put(lambda: None)

    def stop(self) -> None:
        self.left_alone = True
        self._errands.put(None)

    def _run(self) -> None:
        wait: float | None = None
        while not self.left_alone:
            try:
                errand = self._errands.get(timeout=wait)
            except queue.Empty:
                errand = _nothing
            if errand is None:
                return
            errand()
            if not self.left_alone:
                wait = self._rounds()


class Watch:
    """The groups of this process and the threads that look after them."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._runner: Runner | None = None
        self._last_acts: list[Callable[[], None]] = []

    def at_end(self, act: Callable[[], None]) -> None:
        """At exit, when all groups have left."""
        self._last_acts.append(act)

    def not_at_end(self, act: Callable[[], None]) -> None:
        """Take back an `at_end`, if there was one."""
        with contextlib.suppress(ValueError):
            self._last_acts.remove(act)

    def add(self, group: Group) -> None:
        with self._lock:
            self._groups.add(group)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="allstep-watch", daemon=True)
                self._thread.start()
        self._changed.set()
        self.wake_runner()

    def remove(self, group: Group) -> bool:
        """Look after it no more. Whether it was the last one: then both threads have ended."""
        with self._lock:
            self._groups.discard(group)
            if self._groups:
                return False
            ended = self._thread, self._runner
            self._thread = self._runner = None
        self._end_threads(*ended)
        return True

    def _end_threads(self, thread: threading.Thread | None, runner: Runner | None) -> None:
        self._changed.set()
        if runner is not None:
            runner.stop()
        for each in (thread, runner.thread if runner is not None else None):
            if each is not None and each is not threading.current_thread():
                each.join(1.0)

    def send(self, act: Callable[[], Any], seconds: float) -> Any:
        """Have the runner do it; see `Runner.send`."""
        return self._living_runner().send(act, seconds)

    def wake_runner(self) -> None:
        self._living_runner().wake()

    def stop(self) -> None:
        """At exit: tell the groups, and wait a moment for the threads."""
        groups = self._all()
        if groups:
            with contextlib.suppress(Exception):  # the store may be gone
                self.send(lambda: _leave(groups), _LEAVE_SECONDS)
        thread, self._thread = self._thread, None
        for group in groups:
            # a runner that hangs comes back, while there is still an interpreter to come back to
            group.abandon()
        for act in self._last_acts:
            act()
        self._end_threads(thread, self._runner)

    def _living_runner(self) -> Runner:
        with self._lock:
            if self._runner is None or self._runner.left_alone:
                self._runner = Runner(self._go_rounds)
            return self._runner

    def _all(self) -> list[Group]:
        with self._lock:
            return list(self._groups)

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            tick = self._look_at_all()
            self._changed.wait(tick)
            self._changed.clear()

    def _look_at_all(self) -> float | None:
        """Seconds until the next look; None when there is nobody to look after."""
        groups = self._all()
        for group in groups:
            group.look()
        return min((group.tick for group in groups), default=None)

    def _go_rounds(self) -> float | None:
        """Seconds until the next; None when there is nobody to look after."""
        nexts = []
        for group in self._all():
            try:
                nexts.append(group.round())
            except Exception:  # the store is gone, perhaps for a while
                nexts.append(_MOST_WAIT)
        return min(nexts, default=None)


def _leave(groups: list[Group]) -> None:
    for group in groups:
        group.leave()


class _WatchState:
    """The watch of this process; a forked one starts without."""

    def __init__(self) -> None:
        self.watch = Watch()

    def renew(self) -> None:
        """In a forked process, which has none of the threads."""
        self.watch = Watch()

    def stop(self) -> None:
        self.watch.stop()


_process = _WatchState()


def watch() -> Watch:
    """Return the watch of this process."""
    return _process.watch


def _nothing() -> None:
    return None


os.register_at_fork(after_in_child=_process.renew)
atexit.register(_process.stop)
