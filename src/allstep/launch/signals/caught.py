"""Signals to the launcher or an agent, delivered to its loop through a socket.

A signal that is ignored on entry stays ignored: `nohup` ignores SIGHUP so that a run survives the
logout, and a shell ignores SIGINT in jobs that it starts in the background.
"""

import contextlib
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping

from allstep.process.stop_signals import stop_signals


def heeded(numbers: Iterable[int]) -> list[int]:
    """Return those of `numbers` that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def caught_signals(env: Mapping[str, str]) -> Iterator[socket.socket]:
    """Yield a socket that receives one byte, the number, per signal; ignored ones stay ignored.

    env: may have one more signal (`--stop-signal`). At the end the previous handlers are restored.
    """
    numbers = (signal.SIGINT, signal.SIGHUP, *stop_signals(env))
    wake_out, wake_in = socket.socketpair()
    wake_out.setblocking(False)
    wake_in.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in heeded(numbers)}
    before_fd = signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
    try:
        yield wake_in
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        wake_in.close()
        wake_out.close()
