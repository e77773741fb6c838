"""Memory for batches, used again when nobody holds the batch any more.

Fresh memory costs: the kernel clears each page at its first touch, about as long as a resize of a
image takes to fill it. So a batch's memory comes back to a free list when the last array, tensor
or view of it is gone, and never before:

```
buffer (ours)  <--memoryview--  array  <--- slices, torch.from_numpy(...), tensor views (all keep the array alive)
      ^                            :
      +---------free list----------+  a weak reference says when the array is gone
```

numpy shortens chains of views to their first owner, but not beyond an array that was made from a
memoryview: every view holds that one. Three kinds of buffer: plain, pinned (for a GPU), and shared
with other processes (a memfd: no name, so nothing is left in /dev/shm whatever happens).
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
    """Memory of this process."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.raw: Any = np.empty(nbytes, np.uint8)


class PinnedBuffer(Buffer):
    """Memory that a GPU copies from by itself."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self.nbytes = nbytes
        self.raw = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


class SharedBuffer(Buffer):
    """Memory that other processes map: they get `fd`, and know it by `number`."""

    _numbers = count()
    alive: set[int] = set()  # noqa: RUF012  # the numbers of all that live, in this process

    def __init__(self, nbytes: int) -> None:
        _check_room(nbytes)
        self.nbytes, self.number = nbytes, next(self._numbers)
        self.fd = os.memfd_create("allstep-batch", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)  # an error now, not a SIGBUS later
            self.raw = mmap.mmap(self.fd, nbytes)
        except OSError as error:
            os.close(self.fd)
            raise AllstepError(
                f"no memory for a batch of {nbytes} bytes: {error.strerror}; a smaller batch or"
                " `ahead` may help"
            ) from error
        self.alive.add(self.number)
        weakref.finalize(self, _let_go, self.fd, self.number).atexit = False


def _check_room(nbytes: int) -> None:
    """Before the kernel takes from others, or kills, to give us what is not there."""
    available = machine.memory().available
    if nbytes > available:
        raise AllstepError(
            f"no memory for a batch of {nbytes} bytes: {available} are available; a smaller batch"
            " or `ahead` may help"
        )


def _let_go(fd: int, number: int) -> None:
    SharedBuffer.alive.discard(number)
    os.close(fd)


class _Lease(weakref.ref[NDArray[np.uint8]]):
    """A note that a buffer is lent, as long as the array lives that was made of it."""

    buffer: Buffer


class Memory:
    """Lends buffers and takes them back.

    `keep` free ones are kept at most; `make` makes a new one of so many bytes.
    """

    def __init__(self, keep: int, make: Callable[[int], Buffer] = Buffer) -> None:
        self.keep, self._make = keep, make
        self._free: list[Buffer] = []
        self._lent: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()

    def take(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> tuple[Buffer, NDArray[Any]]:
        """An array of that shape, its content arbitrary, and the buffer it lies in."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        self._collect()
        buffer = self._fitting(max(1, nbytes))
        array = np.frombuffer(memoryview(buffer.raw), np.uint8)
        self._note(buffer, array)
        return buffer, array[:nbytes].view(dtype).reshape(shape)

    def _note(self, buffer: Buffer, array: NDArray[np.uint8]) -> None:
        # The callback is a C function: Python code there would swallow a Ctrl-C that comes while it
        # runs, and may run in any thread.
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
        """A free buffer that is large enough; those too small for today's batches are dropped."""
        while self._free:
            buffer = self._free.pop()
            if buffer.nbytes >= nbytes:
                return buffer
        return self._make(nbytes)
