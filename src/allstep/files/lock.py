"""Processes that want to make the same thing of one file take turns: the first makes it, the others find it made.

The lock is on the file itself (`flock`), so it leaves nothing behind and ends with its holder, however that ends. Where a file cannot be
locked (a file system without locks) all of them work at once; what they make must therefore appear by a rename.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_SECONDS = 120.0
_held = threading.local()


@contextmanager
def in_turn(where: Path | None) -> Iterator[None]:
    """Only one process at a time is in here for the file or folder `where`, as far as it can be locked. A thread may enter twice.

    where: None for what is not on this machine, and cannot be locked.
    """
    mine: set[str] = _held.__dict__.setdefault("names", set())
    descriptor = None if where is None or str(where) in mine else _open(where)
    if descriptor is None:
        yield
        return
    try:
        _wait_for_lock(descriptor)
        mine.add(str(where))
        yield
    finally:
        mine.discard(str(where))
        os.close(descriptor)


def _open(where: Path) -> int | None:
    try:
        return os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # what is wrong with the file, its reader will say better
        return None


def _wait_for_lock(descriptor: int) -> None:
    """Waits, but not for ever: a process that was stopped must not stop the others."""
    end = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < end:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
        else:
            return
