"""Calls into Gloo that may never come back, made by a thread that can be left behind.

Gloo wakes whoever waits for a message when the connection ends, except when a part of the message has already come (torch 2.13): then he
waits until the time-out. A thread that is stuck there cannot be freed, so it must not be the caller's. Handing a call over and its result
back takes some 20 us. Threads are kept and used again, until there is no group any more (`dismiss`); the one whose call did not come
back is not.
"""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

_LOOK = 0.05  # seconds between looks whether it makes sense to wait on
_GRACE = 0.2  # seconds in which a call that is about to come back may do so

Reply = queue.SimpleQueue[tuple[Any, BaseException | None]]


class Helper:
    """A thread that makes calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Reply] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="allstep-aside", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], Any]) -> Reply:
        reply: Reply = queue.SimpleQueue()
        self._calls.put((act, reply))
        return reply

    def end(self) -> None:
        """When no call is under way."""
        self._calls.put(None)
        self._thread.join(1.0)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            act, reply = call
            try:
                reply.put((act(), None))
            except BaseException as error:
                reply.put((None, error))
            del act, reply, call  # what the call held is not ours to keep


_idle: list[Helper] = []


def aside(act: Callable[[], Any], check: Callable[[], None]) -> Any:
    """What `act` returns or raises, or what `check`, asked twenty times a second, raises before that."""
    if torch.is_inference_mode_enabled():
        act = torch.inference_mode()(act)  # each thread has a mode of its own
    helper = _free_helper()
    reply = helper.call(act)
    value, error = _answer(reply, check)
    _idle.append(helper)
    if error is not None:
        raise error
    return value


def dismiss() -> None:
    """End the threads that have nothing to do."""
    while _idle:
        try:
            helper = _idle.pop()
        except IndexError:  # another thread was faster
            return
        helper.end()


def _free_helper() -> Helper:
    try:
        return _idle.pop()
    except IndexError:
        return Helper()


def _answer(reply: Reply, check: Callable[[], None]) -> tuple[Any, BaseException | None]:
    while True:
        try:
            return reply.get(timeout=_LOOK)
        except queue.Empty:
            try:
                check()
            except BaseException:
                _wait_a_little(reply)
                raise


def _wait_a_little(reply: Reply) -> None:
    try:
        reply.get(timeout=_GRACE)
    except queue.Empty:
        return


os.register_at_fork(after_in_child=_idle.clear)
