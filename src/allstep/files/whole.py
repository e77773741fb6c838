"""Writes a file whole or not at all, and through no link.

```
write_whole(path)          a file to write to, which becomes `path` when all went well
replace_file(path, data)   the same, for content that is at hand
create_file(path, data)    the same, but never over another file
new_part(path)             the file while it is written, for writers that need its name
clear_left(folder)         removes what killed writers left
```

The content goes to a new file next to its place, and that file is renamed. A reader, or a kill,
never sees half of it. What is in the file's place is replaced: a symbolic link there, or under the
temporary name, leads nowhere else.

```
table.md                  the file
.table.md.part            the file while it is written
.table.md.1f6a09c2.part   the same for a second writer
```

A writer holds a lock on its part (`flock`) and removes it however it ends, except by a signal or a
power cut. What those leave behind has no lock any more, and the next writer of that file removes
it. Where a file system has no locks, a part that nobody has written to for an hour counts as left.
"""

import errno
import fcntl
import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PART = ".part"
"""How the name of a file under way ends; it begins with a dot."""
_FORGOTTEN_SECONDS = 3600.0
_MOST_TRIES = 100
# Of file systems without links.
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def write_whole(path: Path, *, mode: int = 0o666, sync: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write to (and to read back), which becomes `path` when all went well.

    mode: permissions, less the process's umask. sync: wait until the disk has it, so that it also
    survives a power cut.
    """
    with new_part(path, mode) as part:
        with part.open("rb+") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
        if sync:
            sync_folder(path.parent)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write `content` as `path`, in place of what is there; OSError leaves that as it is.

    mode: permissions of the file, less the process's umask.
    """
    try:
        with write_whole(path, mode=mode) as file:
            file.write(content)
    except OSError as error:
        # A write that fails does not say of which file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def create_file(path: Path, content: bytes) -> bool:
    """Write `content` as `path` unless something is there; return whether it is ours.

    Of two processes that come at the same time one finds the other's file, whole.
    """
    with new_part(path) as part:
        part.write_bytes(content)
        # A link, unlike a rename, does not replace what is there.
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            part.replace(path)
    return True


@contextmanager
def new_part(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield an empty file beside `path`, to be written and renamed; gone afterwards, unless it was
    renamed."""
    part, descriptor = _create(path, mode)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
        os.close(descriptor)


def clear_left(folder: Path, pattern: str = f".*{PART}") -> None:
    """Remove parts in `folder` whose writers are gone."""
    for part in folder.glob(pattern):
        with suppress(OSError):  # another process clears, too
            _remove_if_left(part)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`: without it, a power cut may take a new file
    away."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """A new part, and its descriptor, which holds the lock."""
    part = path.with_name(f".{path.name}{PART}")
    for _ in range(_MOST_TRIES):
        try:
            # O_EXCL: a link that another user has put there is not followed.
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            part = _another(path, part)
            continue
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have taken it for a left one, between its making and its lock.
        if os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)
    raise FileExistsError(
        errno.EEXIST, "no name is free for the file while it is written", str(path)
    )


def _another(path: Path, taken: Path) -> Path:
    """A name to try when one is taken: the same if its writer is gone, else one that cannot be
    known before."""
    clear_left(path.parent, f".{glob.escape(path.name)}*{PART}")
    return (
        path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART}")
        if os.path.lexists(taken)
        else taken
    )


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
