"""Calls into Gloo that may never return, made in a helper thread that can be abandoned.

When a connection ends, Gloo wakes the threads that wait for a message, except if a part of the
message has already arrived (torch 2.13): that thread waits until the timeout. It cannot be
interrupted, so it must not be the caller's thread. Passing a call and its result between threads
takes about 20 us. Threads are kept and reused until the last group is closed (`dismiss`); a thread
whose call has not returned is not reused.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from allstep.process.thread_call import CallThread

# Seconds between two calls of `check`.
_LOOK = 0.05
# Seconds for which a call may still return after `check` has raised.
_GRACE = 0.2

_idle: list[CallThread] = []


def call_in_thread(act: Callable[[], Any], check: Callable[[], None]) -> Any:
    """Run `act` in a helper thread; return or raise what it does.

    `check` is called twenty times a second until then; if it raises, the call is abandoned.
    """
    if torch.is_inference_mode_enabled():
        # Each thread has a mode of its own.
        act = torch.inference_mode()(act)
    thread = _free_thread()
    call = thread.start(act)
    while not call.wait(_LOOK):
        try:
            check()
        except BaseException:
            # The thread is abandoned with its call.
            call.wait(_GRACE)
            raise
    _idle.append(thread)
    return call.result()


def begin_call(act: Callable[[], Any]) -> tuple[CallThread, Any]:
    """Run `act` in a helper thread; return the thread and the call, for a caller that waits itself.

    Pass the thread to `reuse` once the call has ended; a thread that is stuck is abandoned.
    """
    if torch.is_inference_mode_enabled():
        act = torch.inference_mode()(act)
    thread = _free_thread()
    return thread, thread.start(act)


def reuse(thread: CallThread) -> None:
    """Keep a thread whose call has ended for further calls."""
    _idle.append(thread)


def dismiss() -> None:
    """End the idle threads."""
    while _idle:
        try:
            thread = _idle.pop()
        # Another thread took the last one.
        except IndexError:
            return
        thread.end()


def _free_thread() -> CallThread:
    try:
        return _idle.pop()
    except IndexError:
        return CallThread("allstep-aside")


os.register_at_fork(after_in_child=_idle.clear)
