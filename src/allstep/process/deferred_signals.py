"""Signals to a worker of an elastic run, which count only once its agent confirms them.

Slurm sends a signal to all processes of a job step: the agent and its workers. What it means is
decided by the launcher, which learns from the agents which hosts have received it:

```
all hosts    the run stops: the agent sends CONFIRM, and the worker acts (saves, or ends)
some hosts   the workers of these hosts leave the world after their step: the signal has no effect
```

CONFIRM is SIGURG, which processes without a handler ignore. Python calls handlers in the order of
their numbers, not of arrival, so both orders of the two signals lead to the action. A confirmed run
stops, so later signals need no confirmation.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from allstep.process.stop_signals import stop_signals

CONFIRM = signal.SIGURG
"""The signal by which an agent confirms those before it."""


class DeferredSignals:
    """Handlers that call `act` with the number of a signal after CONFIRM. For the main thread."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self._process = os.getpid()
        self._received: list[int] = []
        self._is_confirmed = False

    def install(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Handle these signals; return the handlers before, by number."""
        before = {number: signal.signal(number, self._note) for number in numbers}
        if before:
            before[int(CONFIRM)] = signal.signal(CONFIRM, self._confirm)
        return before

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            die_of(number)
        elif self._is_confirmed:
            self._act(number)
        else:
            self._received.append(number)

    def _confirm(self, number: int, frame: FrameType | None) -> None:
        self._is_confirmed = True
        received, self._received = self._received, []
        for each in received:
            self._act(each)


def defer_stop_signals(env: Mapping[str, str]) -> None:
    """Let the stop signals wait for their confirmation, except those that the program handles.

    Only the main thread can change handlers; elsewhere this does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        numbers = stop_signals(env)
        DeferredSignals(die_of).install(
            number for number in numbers if signal.getsignal(number) is signal.SIG_DFL
        )


def die_of(number: int) -> None:
    """End this process by a signal with the default handler.

    A process that was forked from one with our handler must end, as its parent expects.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
