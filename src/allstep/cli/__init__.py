"""The command `allstep`: one file per verb.

A verb's file holds its options and hands over to the layer that does the work, imported inside the function: `allstep --help`
loads no torch. A `UserError` anywhere below ends as one line and exit status 2; a traceback means a defect of ours.
"""

import errno
import sys

from allstep.cli.app import app
from allstep.cli.shortage import shortage
from allstep.errors import AllstepError
from allstep.escaping import print_notice

__all__ = ["main"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """Entry point of the console script and of `python -m allstep`."""
    try:
        app()
    except AllstepError as error:
        print_notice(str(error))
        sys.exit(error.exit_code)
    except Exception as error:
        line = _full_output(error) or shortage(error)
        if line is None:
            raise
        print_notice(line)
        sys.exit(1)


def _full_output(error: Exception) -> str | None:
    """Return one line about a full disk below standard output.

    A write without a file name is one to standard output; all other full disks are reported where
    they occur.
    """
    if not isinstance(error, OSError) or error.errno not in _FULL or error.filename is not None:
        return None
    return f"cannot write standard output: {error.strerror}"
