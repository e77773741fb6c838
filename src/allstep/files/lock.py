"""Locks between processes, on files: one process at a time, and none that outlives its holder.

```
in_turn(file)           those who make the same thing of a file take turns; without locks all work at once
locked(file, seconds)   one process at a time; LockTaken when another has it for longer
try_lock(descriptor)    take the lock of an open file, or not
```

All are `flock` of the system, which ends with its holder, however that ends: nothing needs to be
cleared away after a kill. Some parallel file systems have no locks. There a lock counts as taken,
so what is made under it must appear by a rename (`whole`).
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
# A link in its place could lead to another file of the user's; opening a pipe could wait.
_HOW = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_held = threading.local()


class LockTaken(TimeoutError):
    """Another process has the lock. `holder`: what it wrote into the file, or nothing."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder or 'another process'}")
        self.path, self.holder = path, holder


@contextmanager
def locked(path: Path, seconds: float = 0.0) -> Iterator[int]:
    """Hold the lock of the file `path`, which is made if needed; yield its descriptor.

    seconds: how long to wait for another holder before LockTaken. OSError when it cannot be opened.
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
    """Only one process at a time is in here for the file or folder `where`, as far as it can be
    locked. A thread may enter twice.

    where: None for what is not on this machine, and cannot be locked. A process that was stopped
    must not stop the others, so nobody waits for more than two minutes.
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
    """Take the lock of an open file; return whether it is ours.

    A file system without locks gives it to all.
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
    last = time.monotonic() + seconds
    while not try_lock(descriptor):
        if time.monotonic() >= last:
            return False
        time.sleep(_NAP)
    return True


def _open(where: Path) -> int | None:
    try:
        return os.open(where, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # what is wrong with the file, its reader will say better
        return None
