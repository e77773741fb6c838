"""A file that is there whole or not at all.

It is written under a hidden temporary name beside its place, brought to the disk, and then renamed. Whatever stops the writer, but
`kill -9` and a power cut, also removes the temporary file. Those two leave one behind, always under the same name: the next writer of that
file removes it, and who holds the lock on a folder may remove all of them. There must be such a lock, or two writers would meet.

```
x.tfrecord        the file
.x.tfrecord.part  the file while it is written
```
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PART = ".part"


def part_of(path: Path) -> Path:
    """What `path` is called while it is written."""
    return path.with_name(f".{path.name}{PART}")


@contextmanager
def write_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to (and to read back), which becomes `path` when all went well."""
    part = part_of(path)
    # Left by a kill, or a link put there by another user, which must not be written through.
    part.unlink(missing_ok=True)
    try:
        with part.open("xb+") as file:
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


def _sync_folder(folder: Path) -> None:
    """A new name survives a power cut only when its folder is on the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
