"""Error messages for failed writes, above all for a full disk."""

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
    """Convert an OSError of writing into `folder` to a DataError with the next step."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise DataError(f"{error.filename or folder}: {error.strerror or error}") from error
        room = f", {nbytes(shutil.disk_usage(folder).free)} are free" if folder.exists() else ""
        next_step = (
            "free some space and repeat the command: it resumes with the shard that did not fit"
        )
        raise DataError(f"{folder}: the disk is full{room}; {next_step}") from error
