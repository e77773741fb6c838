"""One run in a folder at a time: `run.lock` is locked by rank 0's process for as long as it trains,
and says who that is.

A run that was just killed may take a moment to be gone: whoever comes next waits that long.
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
PATIENCE = 10.0
"""Seconds that a folder may still be held by a run that was killed."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Within it no other process holds `folder`.

    ConfigError when another does, or when nothing can be written there.
    """
    with contextlib.ExitStack() as held:
        try:
            handle = held.enter_context(locked(folder / LOCK, PATIENCE))
        except LockTaken as error:
            holder = error.holder or "another process"
            raise ConfigError(
                f"{folder}: is being trained by {holder}; wait for its end, or give another --out"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{folder / LOCK}: cannot be written: {error.strerror or error}"
            ) from error
        _sign(handle, f"process {os.getpid()} on {socket.gethostname()}")
        yield
        _sign(handle, "")


def check_free(folder: Path) -> None:
    """ConfigError when `hold` would raise one."""
    with hold(folder):
        pass


def _sign(handle: int, who: str) -> None:
    """For the message to others only, so a disk that is full does no harm."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, os.fsencode(who), 0)
