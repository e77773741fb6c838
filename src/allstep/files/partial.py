"""Files on their way: what is being written has a name that ends in `.part`, until it is whole and renamed.

A writer holds a lock on its part (`flock`) and removes it however it ends, except by a signal or a
power cut. What those leave behind has no lock any more, and the next writer in that folder removes
it. Where a file system has no locks, a part that nobody has written to for an hour counts as left.
"""

import fcntl
import glob
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FORGOTTEN_SECONDS = 3600.0


@contextmanager
def new_part(place: Path) -> Iterator[Path]:
    """Yield an empty file beside `place`, to be written and renamed; gone afterwards, unless it was renamed.

    It has its usual name, or one of this thread's own where somebody else writes.
    """
    # Looked for only then: listing a folder of many shards takes long.
    if place.with_name(f"{place.name}.part").exists():
        clear_forgotten(place.parent, f"{glob.escape(place.name)}*.part")
    part, descriptor = _create(place)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
        os.close(descriptor)


def clear_forgotten(folder: Path, pattern: str = "*.part") -> None:
    """Remove parts in `folder` whose writers are gone."""
    for part in folder.glob(pattern):
        with suppress(OSError):  # another process clears, too
            _remove_if_left(part)


def _create(place: Path) -> tuple[Path, int]:
    """A new part, and its descriptor, which holds the lock."""
    part = place.with_name(f"{place.name}.part")
    while True:
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            own = place.with_name(f"{place.name}.{os.getpid()}-{threading.get_ident()}.part")
            if part == own:
                raise
            part = own
            continue
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have taken it for a left one, between its making and its lock.
        if os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)


def _remove_if_left(part: Path) -> None:
    descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - os.fstat(descriptor).st_mtime <= _FORGOTTEN_SECONDS:
                return
        # With the lock, the name cannot come to mean another file before it is removed.
        if part.lstat().st_ino == os.fstat(descriptor).st_ino:
            part.unlink()
    finally:
        os.close(descriptor)
