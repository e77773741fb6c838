"""A file as memory: read-only, shared with every process that maps it, and without an open
descriptor.

Python's own `mmap` keeps a descriptor open for each map (until 3.13), and a set of a thousand
shards with a thousand indexes would meet the usual limit of 1,024. The kernel needs none: the file
may be closed once it is mapped.

```
open -> fstat -> mmap(2) -> close         what is left is memory; any view of it keeps it mapped, the last view's end unmaps it
```

The size is taken from the open file. A file that is cut shorter afterwards, while it is mapped,
ends the process when the lost part is touched (SIGBUS): sets are replaced by renaming a new file
over the old one, never by writing into it. docs/data.md says so.
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

    Raises OSError, also for a pipe or device.
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
    if not size:  # mmap(2) refuses to map nothing
        return memoryview(b"")
    address = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(
            ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}"
        )
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(
        memory, _libc.munmap, address, size
    ).atexit = False  # a thread may still read when the program ends
    return memoryview(memory).cast("B").toreadonly()
