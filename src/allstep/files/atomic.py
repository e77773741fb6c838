"""Writes files atomically: complete or not at all, and never through a link.

```
write_atomic(path)         yield a file to write to, which becomes `path` if the block succeeds
replace_file(path, data)   the same, for content in memory
create_file(path, data)    the same, but never over an existing file
new_part(path)             yield the path of the temporary file, for writers that need its name
remove_leftovers(folder)   remove the temporary files of killed writers
```

The content goes to a temporary file in the same folder, which is then renamed. A reader never sees
half of it, also after a kill. The rename replaces what has the name: a symbolic link there, or
under the temporary name, is not followed.

```
table.md                  the file
.table.md.part            the temporary file
.table.md.1f6a09c2.part   the temporary file of a second writer
```

A writer holds a lock on its temporary file (`flock`) and removes it however it ends, except by a
signal or a power cut. A temporary file that these leave behind has no lock, and the next writer of
that file removes it. On a file system without locks, a temporary file counts as left behind if it
has not been written to for an hour.
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
"""End of a temporary file's name; it begins with a dot."""
_LEFTOVER_SECONDS = 3600.0
_MAX_TRIES = 100
# Errors of os.link on file systems without hard links.
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def write_atomic(path: Path, *, mode: int = 0o666, sync: bool = False) -> Iterator[IO[bytes]]:
    """Yield a file to write to (and to read back), which becomes `path` if the block succeeds.

    mode: permissions, less the process's umask. sync: wait until the file is on the disk, so that
    it survives a power cut (default: do not wait).
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
    """Write `content` as `path` and replace an existing file; after an OSError that is unchanged.

    mode: permissions of the file, less the process's umask.
    """
    try:
        with write_atomic(path, mode=mode) as file:
            file.write(content)
    except OSError as error:
        # The error of a failed write does not name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error


def create_file(path: Path, content: bytes) -> bool:
    """Write `content` as `path` unless that exists; return whether this call created it.

    Of two processes that call this at the same time, one finds the complete file of the other.
    """
    with new_part(path) as part:
        part.write_bytes(content)
        # Unlike a rename, a hard link does not replace an existing file.
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
    """Yield the path of an empty temporary file next to `path`, to be written and renamed.

    It is removed at the end unless it was renamed. mode: permissions, less the process's umask.
    """
    part, descriptor = _create(path, mode)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)
        os.close(descriptor)


def remove_leftovers(folder: Path, pattern: str = f".*{PART}") -> None:
    """Remove temporary files in `folder` that match `pattern` and whose writers have ended."""
    for part in folder.glob(pattern):
        # Another process may remove it at the same time.
        with suppress(OSError):
            _remove_if_leftover(part)


def sync_folder(folder: Path) -> None:
    """Wait until the file names in `folder` are on disk; else a power cut may lose a new file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create(path: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file; return its path, and the descriptor that holds its lock."""
    part = path.with_name(f".{path.name}{PART}")
    for _ in range(_MAX_TRIES):
        try:
            # O_EXCL does not follow a link that another user may have put there.
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            part = _other_name(path, part)
            continue
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between creation and lock, another process may have removed it as left behind.
        if os.fstat(descriptor).st_nlink:
            return part, descriptor
        os.close(descriptor)
    raise FileExistsError(errno.EEXIST, "no name is free for its temporary file", str(path))


def _other_name(path: Path, taken: Path) -> Path:
    """Return the next name to try: `taken` if its writer has ended, else an unpredictable one."""
    remove_leftovers(path.parent, f".{glob.escape(path.name)}*{PART}")
    return (
        path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART}")
        if os.path.lexists(taken)
        else taken
    )


def _remove_if_leftover(part: Path) -> None:
    """Remove a temporary file unless its writer is alive."""
    descriptor = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - os.fstat(descriptor).st_mtime <= _LEFTOVER_SECONDS:
                return
        # While the lock is held, the name cannot come to mean another file before it is removed.
        if part.lstat().st_ino == os.fstat(descriptor).st_ino:
            part.unlink()
    finally:
        os.close(descriptor)
