"""Signals to the launcher, delivered to its loop through a socket.

A signal that is ignored on entry stays ignored: `nohup` ignores SIGHUP so that a run survives the
logout, and a shell ignores SIGINT in jobs that it starts in the background.
"""

import contextlib
import signal
import socket
from collections.abc import Iterable, Iterator

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return those of `numbers` that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def caught_signals() -> Iterator[socket.socket]:
    """Yield a socket that receives one byte, the number, per signal; ignored ones stay ignored.

    At the end the previous handlers are restored.
    """
    wake_out, wake_in = socket.socketpair()
    wake_out.setblocking(False)
    wake_in.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in heeded(_CAUGHT)}
    before_fd = signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
    try:
        yield wake_in
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        wake_in.close()
        wake_out.close()
