"""Standard output and error that wait for their reader, also where writing does not block.

A program that starts a command may have set its pipe to non-blocking, as Node.js does. Python's
streams then drop what the pipe cannot take at once.
"""

import io
import os
import select
import sys
from typing import Any


class PatientFile(io.RawIOBase):
    """A file descriptor for writing; `write` waits until the descriptor takes bytes.

    The descriptor itself stays as it is, since other processes may share it.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, content: Any) -> int:
        """Write at least one byte of `content`, and return how many."""
        while True:
            try:
                return os.write(self._descriptor, content)
            except BlockingIOError:
                waiting = select.poll()
                waiting.register(self._descriptor, select.POLLOUT)
                waiting.poll()

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)


def make_outputs_patient() -> None:
    """Replace `sys.stdout` and `sys.stderr` where their descriptor does not block."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not _blocks(stream):
            setattr(sys, name, _patient(stream))


def _blocks(stream: io.TextIOWrapper) -> bool:
    """Return whether writing blocks; True for a stream without a descriptor."""
    try:
        return os.get_blocking(stream.fileno())
    except (OSError, ValueError):
        return True


def _patient(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return a stream like `stream` that waits."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(PatientFile(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
