"""Calls into Gloo that may never come back, made by a thread that can be left behind.

Gloo wakes whoever waits for a message when the connection ends, except when a part of the message
has already come (torch 2.13): then he waits until the time-out. A thread that is stuck there cannot
be freed, so it must not be the caller's. Handing a call over and its result back takes some 20 us.
Threads are kept and used again, until there is no group any more (`dismiss`); the one whose call
did not come back is not.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from allstep.process.thread_call import CallThread

_LOOK = 0.05  # seconds between looks whether it makes sense to wait on
_GRACE = 0.2  # seconds in which a call that is about to come back may do so

_idle: list[CallThread] = []


def call_in_thread(act: Callable[[], Any], check: Callable[[], None]) -> Any:
    """What `act` returns or raises, or what `check`, asked twenty times a second, raises before
    that."""
    if torch.is_inference_mode_enabled():
        act = torch.inference_mode()(act)  # each thread has a mode of its own
    thread = _free_thread()
    call = thread.start(act)
    while not call.wait(_LOOK):
        try:
            check()
        except BaseException:
            call.wait(_GRACE)
            raise  # the thread is left behind with its call
    _idle.append(thread)
    return call.result()


def dismiss() -> None:
    """End the threads that have nothing to do."""
    while _idle:
        try:
            thread = _idle.pop()
        except IndexError:  # another thread was faster
            return
        thread.end()


def _free_thread() -> CallThread:
    try:
        return _idle.pop()
    except IndexError:
        return CallThread("allstep-aside")


os.register_at_fork(after_in_child=_idle.clear)
