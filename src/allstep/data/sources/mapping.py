"""Map files into memory: read-only, shared by all processes that map them, without an open
descriptor.

Python's `mmap` keeps a descriptor open per mapping (until 3.13). A dataset of a thousand shards
with a thousand indexes would exceed the usual limit of 1,024. The kernel needs none: a file may be
closed once it is mapped.

```
open -> fstat -> mmap(2) -> close         views keep the memory mapped; the last view unmaps it
```

The size is that of the open file. If a file is truncated while it is mapped, the process gets a
SIGBUS when it reads the lost bytes. Therefore a dataset must be replaced by renaming a new file
over the old one, never by writing into it (docs/data.md).
"""

import ctypes
import os
import weakref
from pathlib import Path

from allstep.files.bounded import check_regular

_PROT_READ, _MAP_SHARED = 1, 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ssize_t,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_file(path: str | Path) -> tuple[memoryview, os.stat_result]:
    """Map the regular file at `path`; return its bytes and its status.

    Raise OSError if it cannot be mapped, also for a pipe or device.
    """
    # Without O_NONBLOCK, opening a pipe would wait until another process opens its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(descriptor, Path(path))
        found = os.fstat(descriptor)
        return _map(descriptor, found.st_size), found
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> memoryview:
    # mmap(2) rejects a length of 0.
    if not size:
        return memoryview(b"")
    address = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(
            ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}"
        )
    memory = (ctypes.c_char * size).from_address(address)
    # Not at exit: a thread may still read when the program ends.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()
