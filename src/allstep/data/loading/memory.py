"""Memory for batches, reused as soon as no reference to the batch is left.

New memory is slow: the kernel clears each page at its first use, which takes about as long as
resizing an image into it. So the memory of a batch returns to a free list when the last array,
tensor or view of it is deleted, and never earlier:

```
buffer  <--memoryview--  array  <--- slices, torch.from_numpy(...), tensor views
   ^                       :         (all of them keep the array alive)
   +-------free list-------+  a weak reference reports that the array was deleted
```

numpy shortens a chain of views to the first owner, but not beyond an array that was made from a
memoryview: every view keeps that array alive. There are three kinds of buffer: plain, pinned (for a
GPU), and shared with other processes (a memfd, which has no name, so that nothing remains in
/dev/shm even after a kill).
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep import machine
from allstep.errors import AllstepError


class Buffer:
    """Memory of this process, `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.raw: Any = np.empty(nbytes, np.uint8)


class PinnedBuffer(Buffer):
    """Page-locked memory, from which a GPU copies asynchronously."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self.nbytes = nbytes
        self.raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


class SharedBuffer(Buffer):
    """Memory that worker processes map: they receive `fd`, and identify it by `number`."""

    _numbers = count()
    # Numbers of all shared buffers of this process that exist; shared by all instances on purpose.
    alive: set[int] = set()  # noqa: RUF012

    def __init__(self, nbytes: int) -> None:
        _check_room(nbytes)
        self.nbytes, self.number = nbytes, next(self._numbers)
        self.fd = os.memfd_create("allstep-batch", os.MFD_CLOEXEC)
        try:
            # A lack of memory is an error here instead of a SIGBUS at the first use.
            os.posix_fallocate(self.fd, 0, nbytes)
            self.raw = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            os.close(self.fd)
            raise _no_memory(nbytes, error.strerror) from error
        self.alive.add(self.number)
        weakref.finalize(self, _release, self.fd, self.number).atexit = False


def _check_room(nbytes: int) -> None:
    """Raise AllstepError if the memory is not available, before the kernel swaps or kills."""
    available = machine.memory().available
    if nbytes > available:
        raise _no_memory(nbytes, f"{available} bytes are available")


def _no_memory(nbytes: int, reason: str | None) -> AllstepError:
    return AllstepError(
        f"no memory for a batch of {nbytes} bytes: {reason}; reduce the batch or `ahead`"
    )


def _release(fd: int, number: int) -> None:
    SharedBuffer.alive.discard(number)
    os.close(fd)


class _Lease(weakref.ref[NDArray[np.uint8]]):
    """A weak reference to the array on a lent buffer; the lease ends with the array."""

    buffer: Buffer


class Memory:
    """A pool of buffers for batches.

    `keep` is the maximum number of free buffers; `make` creates a buffer of a number of bytes.
    """

    def __init__(self, keep: int, make: Callable[[int], Buffer] = Buffer) -> None:
        self.keep, self._make = keep, make
        self._free: list[Buffer] = []
        self._lent: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()

    def take(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> tuple[Buffer, NDArray[Any]]:
        """Return a buffer and an uninitialized array of `shape` in it."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self._collect()
        buffer = self._fitting(max(1, nbytes))
        array = np.frombuffer(memoryview(buffer.raw), np.uint8)
        self._note(buffer, array)
        return buffer, array[:nbytes].view(dtype).reshape(shape)

    def _note(self, buffer: Buffer, array: NDArray[np.uint8]) -> None:
        # The callback is a C function: Python code in it would swallow a Ctrl-C that arrives while
        # it runs, and could run in any thread.
        lease = _Lease(array, self._returned.append)
        lease.buffer = buffer
        self._lent[id(lease)] = lease

    def _collect(self) -> None:
        while self._returned:
            lease = self._returned.popleft()
            del self._lent[id(lease)]
            if len(self._free) < self.keep:
                self._free.append(lease.buffer)

    def _fitting(self, nbytes: int) -> Buffer:
        """Return a free or new buffer of at least `nbytes`; drop free ones that are too small."""
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= nbytes:
                return buffer
        return self._make(nbytes)
