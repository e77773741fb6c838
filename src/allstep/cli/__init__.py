"""The command `allstep`: one file per verb.

A verb's file holds its options and hands over to the layer that does the work, imported inside the
function: `allstep --help` loads no torch. A `UserError` anywhere below ends as one line and exit
status 2; a traceback means a defect of ours.
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
from allstep.errors import AllstepError
from allstep.process.family import keep_exit_codes

__all__ = ["main"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What the system answers to a path that no program could use.
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
_LONGEST_SHOWN = 100


def main() -> None:
    """Entry point of the console script and of `python -m allstep`."""
    _allow_all_characters()
    try:
        with keep_exit_codes():
            app()
    except AllstepError as error:
        print_notice(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        line = (
            _full_output(error)
            or _unusable_path(error)
            or _no_folder_here(error)
            or shortage(error)
        )
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
    """Return one line about a full disk below standard output, or below a file that nothing names."""
    if not isinstance(error, OSError) or error.errno not in _FULL or error.filename is not None:
        return None
    if _may_be_full(1, error.errno):
        return f"cannot write standard output: {error.strerror}"
    return (
        f"cannot write a file: {error.strerror}; make room where this command writes: --out, the"
        " cache, TMPDIR"
    )


def _may_be_full(descriptor: int, reason: int) -> bool:
    """Whether a write to this descriptor may have failed for `reason`: never one to a pipe or a
    terminal."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            # Of devices, /dev/full is.
            return stat.S_ISCHR(mode) and not os.isatty(descriptor)
        # A quota or a limit of the size of files does not show in what the disk has left.
        return reason != errno.ENOSPC or not os.fstatvfs(descriptor).f_bavail
    except OSError:
        return True


def _no_folder_here(error: Exception) -> str | None:
    """Return one line for a command in a folder that was removed: any use of a relative path fails
    there."""
    if isinstance(error, FileNotFoundError):
        try:
            Path.cwd()
        except FileNotFoundError:
            return (
                "the current folder does not exist any more: change to another one (cd), and start"
                " again"
            )
    return None


def _unusable_path(error: Exception) -> str | None:
    """Return one line about a path that the system refuses, wherever a command first touched it."""
    if not isinstance(error, OSError) or error.errno not in _UNUSABLE or error.filename is None:
        return None
    name = str(error.filename)
    shown = (
        name
        if len(name) <= _LONGEST_SHOWN
        else f"{name[:_LONGEST_SHOWN]}... ({len(name)} characters)"
    )
    return f"{shown}: {error.strerror}"
