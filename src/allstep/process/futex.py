"""Waits in the kernel for a number in shared memory to change, and orders memory accesses.

A futex is a 32-bit number in memory that processes share. `sleep_until_changed` compares it with
the value that the caller has seen and falls asleep, in one atomic step of the kernel, so that a
change in between is not missed; `wake` wakes sleepers after a change. Both call through ctypes,
which releases the interpreter lock: other threads of the process run meanwhile, and a wake-up takes
about 10 us.

Numbers of eight bytes that only grow are compared by their lower half (little-endian processors).
On a processor whose number of the system call is not known here, a short sleep is used instead.

A memory fence separates data from the number that announces it: it orders all reads and writes
before it against all after it, on ARM too. Python has no such instruction; releasing and acquiring
a lock has the same effect and takes 0.25 us.
"""

import ctypes
import platform
import threading
import time
from collections.abc import Callable

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT_BITSET, _WAKE_BITSET = 9, 10
ALL_BITS = 0xFFFFFFFF
"""Bit mask of a sleeper that every wake-up reaches, and of a wake-up that reaches every sleeper."""
_NAP = 0.0002
_syscall = ctypes.CDLL(None, use_errno=True).syscall


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory; keep `memory` alive as long as the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def sleep_until_changed(address: int, seen: int, seconds: float, bits: int = ALL_BITS) -> None:
    """Sleep until the number at `address` is not `seen`, until a wake-up, or for `seconds` at most.

    bits: only wake-ups that share one of these bits reach this sleeper (default: all).
    """
    if _SYSCALL is None:
        time.sleep(min(seconds, _NAP))
        return
    end = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds
    limit = _Timespec(int(end), int(end % 1 * 1e9))
    low_half = ctypes.c_uint32(seen & 0xFFFFFFFF)
    _syscall(
        _SYSCALL,
        ctypes.c_void_p(address),
        _WAIT_BITSET,
        low_half,
        ctypes.byref(limit),
        None,
        ctypes.c_uint32(bits),
    )


def wake(address: int, count: int, bits: int = ALL_BITS) -> None:
    """Wake at most `count` sleepers at `address` that share one of these `bits` (default: all)."""
    if _SYSCALL is not None:
        _syscall(
            _SYSCALL,
            ctypes.c_void_p(address),
            _WAKE_BITSET,
            count,
            None,
            None,
            ctypes.c_uint32(bits),
        )


def new_fence() -> Callable[[], None]:
    """Return a memory fence, for one thread at a time."""
    lock = threading.Lock()
    release, acquire = lock.release, lock.acquire
    acquire()

    def fence() -> None:
        release()
        acquire()

    return fence
