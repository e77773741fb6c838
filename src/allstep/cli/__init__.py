"""The command `allstep`: one module or package per verb.

A verb's module defines its options and calls the layer that does the work. It imports that layer
inside the function, so that `allstep --help` does not import torch. A `UserError` from any layer
ends the command with one line and exit status 2; a traceback means a defect of allstep.
"""

import errno
import io
import os
import stat
import sys
from pathlib import Path

from allstep.cli.app import app
from allstep.cli.shortage import shortage
from allstep.console.escape import print_notice
from allstep.console.patient_output import make_outputs_patient
from allstep.errors import AllstepError
from allstep.process.family import keep_exit_codes

__all__ = ["main"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of the system for a path that no program could use.
_UNUSABLE = (
    *_FULL,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
)
_MAX_SHOWN = 100


def main() -> None:
    """Run the command line: entry point of the console script and of `python -m allstep`."""
    make_outputs_patient()
    _allow_all_characters()
    try:
        with keep_exit_codes():
            app()
    except AllstepError as error:
        print_notice(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        describers = (_full_output, _unusable_path, _no_folder_here, shortage)
        line = next(filter(None, (describe(error) for describe in describers)), None)
        if line is None:
            raise
        print_notice(line)
        sys.exit(1)


def _allow_all_characters() -> None:
    """Let standard output and error escape what their encoding does not have, instead of raising.

    With `PYTHONIOENCODING=ascii`, or in the C locale, a bar of a table or the name of a class would
    end the command. A handler that the user chose (`ascii:replace`) stays.
    """
    for stream in (sys.stdout, sys.stderr):
        # surrogateescape is Python's own choice in the C locale; it raises for a bar as well.
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def _full_output(error: Exception) -> str | None:
    """Return one line about a full disk under standard output or an unnamed file; else None."""
    if not isinstance(error, OSError) or error.errno not in _FULL or error.filename is not None:
        return None
    if _may_be_full(1, error.errno):
        return f"cannot write standard output: {error.strerror}"
    return (
        f"cannot write a file: {error.strerror}; make room where this command writes: --out, the"
        " cache, TMPDIR"
    )


def _may_be_full(descriptor: int, reason: int) -> bool:
    """Return whether a write to this descriptor may have failed for `reason`.

    A write to a pipe or a terminal never fails for lack of space.
    """
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            # The device /dev/full reports a full disk.
            return stat.S_ISCHR(mode) and not os.isatty(descriptor)
        # A quota or a limit on file sizes is not visible in the free space of the disk.
        return reason != errno.ENOSPC or not os.fstatvfs(descriptor).f_bavail
    except OSError:
        return True


def _no_folder_here(error: Exception) -> str | None:
    """Return one line if the current folder was removed; else None.

    Any use of a relative path fails there.
    """
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return (
                "the current folder does not exist any more; change to another one (cd) and start"
                " again"
            )
    return None


def _unusable_path(error: Exception) -> str | None:
    """Return one line about a path that the system refuses; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _UNUSABLE or error.filename is None:
        return None
    name = str(error.filename)
    if len(name) > _MAX_SHOWN:
        name = f"{name[:_MAX_SHOWN]}... ({len(name)} characters)"
    return f"{name}: {error.strerror}"
