"""A process next to the workers of a host that shows which signals they have received.

Slurm signals the processes of a job step: with most of its plugins the agent and all processes
below it, with `proctrack/pgid` the agent alone. A user may signal the agent alone, too. The agent
must pass a signal on in the second case, and must not in the first: a worker that gets it twice may
treat the second one as an order to end without saving.

The witness is started like a worker, in a session of its own, with all signals blocked. So each
signal that it receives stays pending, and the kernel lists it in /proc at once.
"""

import contextlib
import os
import resource
import signal
from pathlib import Path

from allstep.process.family import die_with_parent


class Witness:
    """A child process that only receives signals. Start it before there are threads."""

    def __init__(self) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            _be_witness()

    def has_received(self, number: int) -> bool:
        """Return whether the witness, and so the workers, have received this signal."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self._pid}/status").read_text()
            pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
            return bool(pending >> (number - 1) & 1)
        return False


def _be_witness() -> None:
    """Wait until the agent ends; never returns."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        die_with_parent()
        os.setsid()
        # The launcher must see the end of the link when the agent ends.
        os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        while True:
            signal.pause()
    finally:
        os._exit(1)
