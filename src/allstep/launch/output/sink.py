"""Where the launcher writes lines and pieces of lines: a file descriptor that may be slow, full or
closed, and must never end the run.

| what a write meets | what happens |
|---|---|
| a pipe or terminal that takes no more for now | wait until it does, then continue; the caller decides for how long |
| the reader is gone (`| head`) | this and all later lines are dropped |
| no space, a quota, an I/O error | one report on another stream; lines are dropped and counted; one try each second |
| room again | a line with the number of missing lines, then lines as before |
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
    """Wait until the descriptor takes more, however long that takes. Returns True."""
    waiting = select.poll()
    waiting.register(fd, select.POLLOUT)
    waiting.poll()
    return True


def without_blocking(fd: int) -> int:
    """Return a descriptor for the same pipe or terminal whose writes do not block; `fd` for other
    files.

    The mode of `fd` itself belongs to all processes that share it, so it is opened once more.
    """
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode) or os.isatty(fd):
            return os.open(
                f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
    return fd


class Sink:
    """Writes lines to a file descriptor.

    name: what reports call it. report: prints one line elsewhere. clock: seconds, for tests. wait:
    returns True when the descriptor takes more, False to drop this and all later lines.
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
        """Write `data`: lines, the last of which may continue in the next call.

        What cannot be written is dropped, and its newlines are counted; never raises.
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
        """After an error, try to write how many lines are missing; False while there is no room."""
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
        """Whether all of `data` was written."""
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
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            if not self._wait(self.fd):
                raise BrokenPipeError(errno.EPIPE, "nobody reads") from None
            return 0

    def _fail(self, error: OSError) -> None:
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
