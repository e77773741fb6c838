"""Writes the launcher's output to a descriptor that may be slow, full or closed.

An error of the output must never end the run.

| condition | reaction |
|---|---|
| a pipe or terminal accepts no more now | wait until it does; the caller sets for how long |
| the reader is gone (`| head`) | drop this and all later lines |
| no space, a quota, an I/O error | report it once on another stream; drop and count lines |
| after an error | try again once a second; then write the number of missing lines, and continue |
"""

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Callable

_RETRY_SECONDS = 1.0
_READER_IS_GONE = (errno.EPIPE, errno.EBADF)


def wait_for_reader(fd: int) -> bool:
    """Wait without limit until the descriptor accepts more; return True."""
    waiting = select.poll()
    waiting.register(fd, select.POLLOUT)
    waiting.poll()
    return True


def without_blocking(fd: int) -> int:
    """Return a non-blocking descriptor for the same pipe or terminal; `fd` itself for other files.

    The mode of `fd` belongs to all processes that share it, so the file is opened again.
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            return os.open(
                f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
    return fd


class Sink:
    """A file descriptor to which lines are written.

    name: for reports. report: prints one line elsewhere. clock: returns seconds, for tests. wait:
    returns True when the descriptor accepts more, False to drop this and all later lines.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[int], bool] = wait_for_reader,
    ) -> None:
        self.fd, self.name, self._wait = fd, name, wait
        self._report, self._clock = report, clock
        self._is_gone = False
        self._error: OSError | None = None
        self._retry_at = 0.0
        self._num_missing = 0
        self._ends_mid_line = False

    def write(self, data: bytes) -> None:
        """Write lines, the last of which may continue in the next call; never raises.

        Data that cannot be written is dropped, and its newlines are counted.
        """
        if self._is_gone:
            return
        if self._error is not None and not self._write_gap():
            self._num_missing += data.count(b"\n")
        else:
            self._write(data)

    def close(self) -> None:
        """Close the descriptor; network file systems may report a full disk only here."""
        try:
            os.close(self.fd)
        except OSError as error:
            self._fail(error)
        self._is_gone = True

    def _write_gap(self) -> bool:
        """Try to write, after an error, how many lines are missing; return whether it succeeded."""
        if self._clock() < self._retry_at:
            return False
        assert self._error is not None
        start = "\n" if self._ends_mid_line else ""
        why = self._error.strerror
        gap = f"{start}allstep run: {self._num_missing} lines are missing here: {why}\n".encode()
        missing, self._num_missing = self._num_missing, 0
        if self._write(gap):
            self._error = None
            return True
        self._num_missing = missing
        return False

    def _write(self, data: bytes) -> bool:
        """Write `data`; return whether all of it was written."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._write_some(rest) :]
        except OSError as error:
            self._num_missing += bytes(rest).count(b"\n")
            self._fail(error)
            return False
        finally:
            if written := len(data) - len(rest):
                self._ends_mid_line = data[written - 1] != ord("\n")
        return True

    def _write_some(self, data: memoryview) -> int:
        """Write once, or wait until that is possible; return the number of written bytes."""
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            if not self._wait(self.fd):
                raise BrokenPipeError(errno.EPIPE, "the reader does not read") from None
            return 0

    def _fail(self, error: OSError) -> None:
        """Record an error; report the first one, unless the reader has closed its end."""
        if error.errno in _READER_IS_GONE:
            self._is_gone = True
            return
        is_news = self._error is None
        self._error, self._retry_at = error, self._clock() + _RETRY_SECONDS
        if is_news:
            self._report(
                f"allstep run: cannot write {self.name}: {error.strerror}; the run continues"
                " without these lines"
            )
