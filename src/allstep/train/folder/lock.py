"""One run in a folder at a time: `run.lock` is locked by rank 0's process for as long as it trains, and says who that is.

The system lets go of the lock when that process ends, however it ends, so nothing needs to be cleared away after a kill. A run that was
just killed may take a moment to be gone: whoever comes next waits that long.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.errors import ConfigError

LOCK = "run.lock"
PATIENCE = 10.0
"""Seconds that a folder may still be held by a run that was killed."""
_CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_NAP = 0.1
# A link in its place could make the holder's name overwrite another file of the user's.
_HOW = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Within it no other process holds `folder`. ConfigError when another does, or when nothing can be written there."""
    file = folder / LOCK
    try:
        handle = os.open(file, _HOW, 0o666)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror or error}") from error
    try:
        _wait_for(handle, folder)
        _sign(handle, f"process {os.getpid()} on {socket.gethostname()}")
        yield
        _sign(handle, "")
    finally:
        os.close(handle)


def check_free(folder: Path) -> None:
    """ConfigError when `hold` would raise one."""
    with hold(folder):
        pass


def _wait_for(handle: int, folder: Path) -> None:
    last = time.monotonic() + PATIENCE
    while not _lock(handle):
        if time.monotonic() >= last:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
            raise ConfigError(f"{folder}: is being trained by {holder}; wait for its end, or give another --out")
        time.sleep(_NAP)


def _lock(handle: int) -> bool:
    """Whether it is ours now. A file system that has no locks (some parallel ones) does without."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _CANNOT_LOCK
    return True


def _sign(handle: int, who: str) -> None:
    """For the message to others only, so a disk that is full does no harm."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, os.fsencode(who), 0)
