"""The lock of a slice: a robust mutex if all workers can use one, else a byte lock.

The workers choose together, since all must use the same kind.
"""

import json
import threading
from typing import Protocol

from allstep.kvstore.memory.byte_locks import ByteLock, new_lock_file, open_lock_file
from allstep.kvstore.memory.parties import Parties
from allstep.kvstore.memory.robust_mutex import RobustMutex, library


class Lock(Protocol):
    """A lock that is free again when its holder dies."""

    def acquire(self, seconds: float = 0.0) -> bool:
        """Lock; return False if another thread or process holds it for `seconds`."""

    def release(self) -> None:
        """Unlock."""


class ThreadLock:
    """The lock of a slice that only this process has."""

    __slots__ = ("_lock", "release")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release = self._lock.release

    def acquire(self, seconds: float = 0.0) -> bool:
        """Lock; return False if another thread holds it for `seconds`."""
        return self._lock.acquire(timeout=max(0.0, seconds))


class SliceLocks:
    """Makes the locks of a store's slices. All workers of the store create it together."""

    def __init__(self, parties: Parties) -> None:
        self._is_maker = parties.rank == 0
        found = parties.collect("mutex", library())
        self.has_mutexes = bool(found[0]) and len(set(found)) == 1
        self._fd = -1 if self.has_mutexes else _lock_file(parties)
        self._used = 0

    def at(self, address: int) -> Lock:
        """Return the lock of the next slice, in its memory at `address`.

        All workers ask for the same slices in the same order.
        """
        self._used += 1
        if not self.has_mutexes:
            return ByteLock(self._fd, self._used)
        mutex = RobustMutex(address)
        if self._is_maker:
            mutex.make()
        return mutex


def _lock_file(parties: Parties) -> int:
    """Return our descriptor of a file that all workers have opened."""
    if parties.rank == 0:
        fd, path = new_lock_file()
        parties.collect("lock file", json.dumps(path))
    else:
        fd = open_lock_file(json.loads(parties.collect("lock file", "null")[0]))
    # Until here rank 0 must keep its descriptor; it keeps it until the process ends.
    parties.collect("lock file opened", "yes")
    return fd
