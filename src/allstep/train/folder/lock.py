"""The lock of a run folder: one run at a time.

The process of rank 0 locks `run.lock` while it trains, and writes its process number and host into
the file. A run that was just killed may take a moment to end, so locking waits that long.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.errors import ConfigError
from allstep.files.lock import LockTaken, locked

LOCK = "run.lock"
TIMEOUT = 10.0
"""Seconds to wait for the lock, which a killed run may still hold."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` within the context.

    Raise ConfigError if another process holds it, or if the lock file cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            handle = held.enter_context(locked(folder / LOCK, TIMEOUT))
        except LockTaken as error:
            holder = error.holder or "another process"
            raise ConfigError(
                f"{folder}: is being trained by {holder}; wait for its end, or choose another --out"
            ) from error
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"{folder / LOCK}: cannot be written: {reason}") from error
        _write_holder(handle, f"process {os.getpid()} on {socket.gethostname()}")
        yield
        _write_holder(handle, "")


def check_free(folder: Path) -> None:
    """Raise ConfigError if `hold` would raise it."""
    with hold(folder):
        pass


def _write_holder(handle: int, who: str) -> None:
    """Write the holder's name into the lock file.

    It is only used in error messages of other processes, so a full disk is ignored.
    """
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, os.fsencode(who), 0)
