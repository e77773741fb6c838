"""The command `allstep`: one file per verb.

A verb's file holds its options and hands over to the layer that does the work, imported inside the function: `allstep --help`
loads no torch. A `UserError` anywhere below ends as one line and exit status 2; a traceback means a defect of ours.
"""

import errno
import sys

from allstep.cli.app import app
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
    except OSError as error:
        # A write without a file name is one to standard output; all other full disks are reported where they occur.
        if error.errno not in _FULL or error.filename is not None:
            raise
        print_notice(f"cannot write standard output: {error.strerror}")
        sys.exit(1)
