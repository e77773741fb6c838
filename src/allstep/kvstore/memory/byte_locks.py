"""Locks on the bytes of a file in memory, where robust mutexes are not available.

POSIX locks belong to a process, and the kernel frees them when it ends; a child that it has forked
does not get them. (Locks of an open file description would stay with that child.) Two properties
need care:

* Closing *any* descriptor of the file drops all locks of the process. So the file is used for
  nothing else, each process has one descriptor of it, and it stays open.
* Threads of one process do not exclude each other, so each lock has a `threading.Lock` besides.

`F_SETLKW` waits without a limit, so a wait tries again after short naps. Robust mutexes are
preferred: they are three times as fast, and the kernel frees them at once, whatever memory the
holder had.
"""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

_SHORT_NAP, _LONG_NAP = 0.0001, 0.002
_BUSY = (errno.EACCES, errno.EAGAIN)


class ByteLock:
    """The lock on byte `number` of a file. `fd`: this process's one descriptor of it."""

    __slots__ = ("_fd", "_number", "_threads")

    def __init__(self, fd: int, number: int) -> None:
        self._fd, self._number = fd, number
        self._threads = threading.Lock()

    def acquire(self, seconds: float = 0.0) -> bool:
        """Lock; return False if another thread or process holds it for `seconds` (default: now)."""
        end, nap = time.monotonic() + seconds, _SHORT_NAP
        if not self._threads.acquire(timeout=max(0.0, seconds)):
            return False
        try:
            while not (taken := self._try()) and time.monotonic() < end:
                time.sleep(nap)
                nap = min(_LONG_NAP, nap * 1.5)
        except BaseException:
            self._threads.release()
            raise
        if not taken:
            self._threads.release()
        return taken

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._number)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        return True

    def release(self) -> None:
        """Unlock."""
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._number)
        self._threads.release()


def new_lock_file() -> tuple[int, str]:
    """Return a file for locks, as our descriptor of it, and its path for the other processes."""
    fd = os.memfd_create("allstep-locks", os.MFD_CLOEXEC)
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def open_lock_file(path: str) -> int:
    """Return this process's descriptor of the file that another process has made."""
    found = str(Path(path).readlink())
    if "memfd:allstep-locks" not in found:
        raise OSError(f"{path} is {found}, not a file for locks (perhaps another PID namespace)")
    return os.open(Path(path), os.O_RDWR | os.O_CLOEXEC)
