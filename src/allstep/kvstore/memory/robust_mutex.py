"""A robust mutex of pthreads in shared memory, by ctypes.

A mutex is robust if the kernel marks it when the thread that holds it ends, however it ends. The
next `lock` then returns EOWNERDEAD together with the lock. `pthread_mutex_consistent` must follow,
else the mutex is unusable after the unlock. A child that the holder has forked does not hold it.

Rules that came from experiments:

* Unlock before the memory is unmapped: glibc links the mutexes that a thread holds.
* The size and layout of a mutex belong to the C library, so all processes must use the same one
  (`library`).
* `trylock` and `unlock` never block and keep the interpreter lock (`PyDLL`): releasing it would
  cost more than the call when other threads wait for it. A lock that waits releases it (`CDLL`).
* The wait has a limit on the monotonic clock. The plain `timedlock` follows the wall clock, which
  may be set back in the middle of a wait.
"""

import ctypes
import errno
import mmap
import platform
import time
from collections.abc import Callable

from allstep.process.futex import address_of

MUTEX_BYTES = 64
"""Room for a mutex: 40 bytes on x86-64, 48 on ARM."""

_PROCESS_SHARED, _ROBUST, _ERROR_CHECK = 1, 1, 2
_INIT = ("pthread_mutexattr_init", "pthread_mutexattr_destroy", "pthread_mutex_init")
_SETTINGS = (
    ("pthread_mutexattr_setpshared", _PROCESS_SHARED),
    ("pthread_mutexattr_setrobust", _ROBUST),
    # The thread that holds the mutex gets an error instead of waiting for itself.
    ("pthread_mutexattr_settype", _ERROR_CHECK),
)

_quick, _waiting = ctypes.PyDLL(None), ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class RobustMutex:
    """One mutex, `MUTEX_BYTES` of shared memory from `address` on.

    One process calls `make` before any process locks it.
    """

    __slots__ = ("_at", "_lock_quick", "_unlock", "_waits")

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)
        self._lock_quick: Callable[[ctypes.c_void_p], int] = _quick.pthread_mutex_trylock
        self._unlock: Callable[[ctypes.c_void_p], int] = _quick.pthread_mutex_unlock
        self._waits = _waiting.pthread_mutex_clocklock

    def make(self) -> None:
        """Initialize the mutex: shared between processes, robust, with checks."""
        attributes = ctypes.create_string_buffer(64)
        for name in _INIT[:1]:
            _raise_for(name, getattr(_quick, name)(attributes))
        for name, value in _SETTINGS:
            _raise_for(name, getattr(_quick, name)(attributes, value))
        _raise_for("pthread_mutex_init", _quick.pthread_mutex_init(self._at, attributes))
        _quick.pthread_mutexattr_destroy(attributes)

    def acquire(self, seconds: float = 0.0) -> bool:
        """Lock; return False if another thread or process holds it for `seconds` (default: now)."""
        code = self._lock_quick(self._at)
        # Almost always.
        if code == 0:
            return True
        if code == errno.EBUSY and seconds > 0:
            end = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds
            limit = _Timespec(int(end), int(end % 1 * 1e9))
            code = self._waits(self._at, time.CLOCK_MONOTONIC, ctypes.byref(limit))
        return self._taken(code)

    def _taken(self, code: int) -> bool:
        if code == errno.EOWNERDEAD:
            _raise_for("pthread_mutex_consistent", _quick.pthread_mutex_consistent(self._at))
            return True
        if code in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        _raise_for("pthread_mutex_lock", code)
        return True

    def release(self) -> None:
        """Unlock; OSError if this thread does not hold it."""
        code = self._unlock(self._at)
        if code:
            _raise_for("pthread_mutex_unlock", code)


def _raise_for(name: str, code: int) -> None:
    if code:
        raise OSError(code, f"{name}: {errno.errorcode.get(code, code)}")


def library() -> str:
    """Return the C library if robust mutexes work in this process, else "".

    Processes may share mutexes if this text is the same in all of them.
    """
    memory = mmap.mmap(-1, MUTEX_BYTES)
    mutex_at = address_of(memoryview(memory))
    try:
        mutex = RobustMutex(mutex_at)
        mutex.make()
        if not mutex.acquire():
            return ""
        mutex.release()
    # A C library without one of these functions, or a kernel that refuses them.
    except (AttributeError, OSError):
        return ""
    size = ctypes.sizeof(ctypes.c_void_p)
    return f"{'-'.join(platform.libc_ver())} {platform.machine()} {size}"
