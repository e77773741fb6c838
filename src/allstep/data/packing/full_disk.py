"""What is said when the system refuses to write, above all when the disk is full."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.console.quantities import nbytes
from allstep.errors import DataError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def clear_error(folder: Path) -> Iterator[None]:
    """What the system says of writing into `folder`, as an error the user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
        room = f", {nbytes(shutil.disk_usage(folder).free)} are left" if folder.exists() else ""
        next_step = (
            "make room and give the same command again: it goes on with the shard that did not fit"
        )
        raise DataError(f"{folder}: the disk is full{room}; {next_step}") from error
