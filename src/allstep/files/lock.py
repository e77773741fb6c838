"""Locks between processes, on files.

```
in_turn(path)           one process at a time, waits 2 minutes at most; no lock where impossible
locked(path, seconds)   one process at a time; LockTaken if another holds it for longer
try_lock(descriptor)    take the lock of an open file and return whether it succeeded
```

All use the system's `flock`, which ends with its holder, however that ends: nothing needs to be
cleaned up after a kill. Some parallel file systems have no locks. There every process gets the
lock, so files made under it must appear by a rename (`atomic`).
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST_SECONDS = 120.0
_NAP = 0.02
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# NOFOLLOW: a link in its place could lead to another file. NONBLOCK: opening a pipe could wait.
_HOW = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_held = threading.local()


class LockTaken(TimeoutError):
    """Another process holds the lock. `holder` is the text that it wrote into the file, or ""."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}")
        self.path, self.holder = path, holder


@contextmanager
def locked(path: Path, seconds: float = 0.0) -> Iterator[int]:
    """Hold the lock of the file `path`, which is created if needed; yield its descriptor.

    seconds: time to wait for another holder before LockTaken (default 0). OSError if the file
    cannot be opened.
    """
    descriptor = os.open(path, _HOW, 0o666)
    try:
        if not _wait_for(descriptor, seconds):
            raise LockTaken(path, os.pread(descriptor, 200, 0).decode(errors="replace"))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def in_turn(where: Path | None) -> Iterator[None]:
    """Let one process at a time run the block for the file or folder `where`, if it can be locked.

    A thread may enter twice. where: None for data that is not on this machine and has no lock. A
    process that is stopped must not stop the others, so the wait ends after two minutes, and the
    block runs without the lock.
    """
    mine: set[str] = _held.__dict__.setdefault("names", set())
    descriptor = None if where is None or str(where) in mine else _open(where)
    if descriptor is None:
        yield
        return
    try:
        _wait_for(descriptor, _LONGEST_SECONDS)
        mine.add(str(where))
        yield
    finally:
        mine.discard(str(where))
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file; return whether this process holds it.

    On a file system without locks every process gets it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _wait_for(descriptor: int, seconds: float) -> bool:
    """Take the lock, for which to wait `seconds` at most; return whether this process holds it."""
    last = time.monotonic() + seconds
    while not try_lock(descriptor):
        if time.monotonic() >= last:
            return False
        time.sleep(_NAP)
    return True


def _open(where: Path) -> int | None:
    try:
        return os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    # The reader of the file will report the error in its own terms.
    except OSError:
        return None
