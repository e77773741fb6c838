"""Files that are there whole or not at all, and what is said when the disk is full.

A shard is written under a hidden temporary name, brought to the disk, and then renamed. Whatever stops the writer, but `kill -9` and a
power cut, also removes the temporary file; those two leave one behind, which the next packing removes.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from allstep.errors import DataError

PART = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def write_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `path` when all went well."""
    part = path.with_name(f".{path.name}{PART}")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_small(path: Path, text: str) -> None:
    """A whole text file at once."""
    with write_whole(path) as file:
        file.write(text.encode())


@contextmanager
def clear_error(folder: Path) -> Iterator[None]:
    """What the system says of writing into `folder`, as an error the user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
        room = f", {shutil.disk_usage(folder).free / 1e6:.0f} MB are left" if folder.exists() else ""
        next_step = "make room and give the same command again: it goes on with the shard that did not fit"
        raise DataError(f"{folder}: the disk is full{room}; {next_step}") from error


def _sync_folder(folder: Path) -> None:
    """A new name survives a power cut only when its folder is on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
