"""Two threads per process that look after its groups, from the first group to the last.

The *watch* thread wakes twice a second and calls `look` of each group, which must not block. Calls
to the store may block, when it is on a host that is cut off; they are made by the *runner* thread.
A caller that sends a call to the runner waits for a bounded time; if the call has not returned by
then, that thread is abandoned and another one replaces it. Between such calls the runner calls
`round` of each group.

Both are daemon threads. They are stopped at exit, because a thread that returns from C++ after the
interpreter has been finalized crashes the process. A forked process has neither thread and drops
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

from allstep.comm.health.failure import Failure
from allstep.process.thread_call import Call, CallTimeout

_LEAVE_SECONDS = 2.0
_MAX_WAIT = 5.0


class Group(Protocol):
    """What the two threads need of a group."""

    @property
    def tick(self) -> float:
        """Seconds between two calls of `look` that the group's limits require."""

    def look(self) -> None:
        """Check for failures. Must not block."""

    def round(self) -> float:
        """Do periodic work with the store; return seconds until the next call. May block."""

    def fail_alone(self, failure: Failure) -> None:
        """End the group in this process; other ranks and groups learn of it in another way."""

    def abandon(self) -> None:
        """Make blocked calls return: the process ends now."""

    def leave(self) -> None:
        """Record the end of the process. May block."""


class Runner:
    """A thread for calls that may block.

    `rounds` is called between them and returns the seconds until its next call, or None for never.
    """

    def __init__(self, rounds: Callable[[], float | None]) -> None:
        self._rounds = rounds
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.left_alone = False
        self.thread = threading.Thread(target=self._run, name="allstep-runner", daemon=True)
        self.thread.start()

    def send(self, act: Callable[[], Any], seconds: float) -> Any:
        """Return or raise what `act` does in the thread; TimeoutError if it takes longer."""
        call = Call(act)
        self._tasks.put(call.run)
        try:
            return call.result(seconds)
        except CallTimeout:
            self.left_alone = True
            raise

    def wake(self) -> None:
        """Start the next round now."""
        self._tasks.put(lambda: None)

    def stop(self) -> None:
        self.left_alone = True
        self._tasks.put(None)

    def _run(self) -> None:
        wait: float | None = None
        while not self.left_alone:
            try:
                task = self._tasks.get(timeout=wait)
            except queue.Empty:
                task = _nothing
            if task is None:
                return
            task()
            if not self.left_alone:
                wait = self._rounds()


class Watch:
    """The groups of this process, and the threads that look after them."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._runner: Runner | None = None
        self._last_acts: list[Callable[[], None]] = []

    def at_end(self, act: Callable[[], None]) -> None:
        """Call `act` at exit, after all groups have left."""
        self._last_acts.append(act)

    def not_at_end(self, act: Callable[[], None]) -> None:
        """Withdraw an `at_end`, if there was one."""
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
        """Remove a group; return whether it was the last one, so that both threads have ended."""
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

    def fail_all(self, failure: Failure) -> None:
        """End all groups of this process, so that none of its threads waits for a lost rank."""
        for group in self.groups():
            group.fail_alone(failure)

    def groups(self) -> list[Group]:
        """Return the groups of this process."""
        with self._lock:
            return list(self._groups)

    def send(self, act: Callable[[], Any], seconds: float) -> Any:
        """Run `act` in the runner thread; see `Runner.send`."""
        return self._living_runner().send(act, seconds)

    def wake_runner(self) -> None:
        self._living_runner().wake()

    def stop(self) -> None:
        """Let the groups leave at exit, and wait briefly for the threads."""
        groups = self.groups()
        if groups:
            # The store may be lost.
            with contextlib.suppress(Exception):
                self.send(lambda: _leave(groups), _LEAVE_SECONDS)
        thread, self._thread = self._thread, None
        for group in groups:
            # A blocked runner must return before the interpreter is finalized.
            group.abandon()
        for act in self._last_acts:
            act()
        self._end_threads(thread, self._runner)

    def _living_runner(self) -> Runner:
        with self._lock:
            if self._runner is None or self._runner.left_alone:
                self._runner = Runner(self._run_rounds)
            return self._runner

    def _run(self) -> None:
        while self._thread is threading.current_thread():
            tick = self._look_at_all()
            self._changed.wait(tick)
            self._changed.clear()

    def _look_at_all(self) -> float | None:
        """Check all groups; return seconds until the next check, or None if there is no group."""
        groups = self.groups()
        for group in groups:
            group.look()
        return min((group.tick for group in groups), default=None)

    def _run_rounds(self) -> float | None:
        """Run a round of all groups; return seconds until the next, or None without a group."""
        nexts = []
        for group in self.groups():
            try:
                nexts.append(group.round())
            # The store cannot be reached, perhaps only for a while.
            except Exception:
                nexts.append(_MAX_WAIT)
        return min(nexts, default=None)


def _leave(groups: list[Group]) -> None:
    for group in groups:
        group.leave()


class _WatchState:
    """The watch of this process; a forked process gets a new one."""

    def __init__(self) -> None:
        self.watch = Watch()

    def renew(self) -> None:
        """Start with a new watch in a forked process, which has none of the threads."""
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
