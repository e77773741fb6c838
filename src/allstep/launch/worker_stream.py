"""One output stream of a worker, read by the agent and sent to the launcher.

The agent pauses its streams while the launcher does not read fast enough; then the pipe fills and
the worker waits in its next write.
"""

import fcntl
import os
import selectors
import sys
import termios
from typing import IO, Literal

from allstep.launch.link import Link
from allstep.launch.messages import Lines
from allstep.launch.output.lines import LineCutter


class WorkerStream:
    """The pipe of a worker's standard output ("out") or standard error ("err").

    selector: calls `read` when the pipe has data, unless the stream is paused or has ended. link:
    the lines are sent there. pipe: closed at its end.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        link: Link,
        rank: int,
        name: Literal["out", "err"],
        pipe: IO[bytes],
    ) -> None:
        self._selector, self._link = selector, link
        self.rank, self.name, self.fd = rank, name, pipe.fileno()
        self._pipe = pipe
        self.lines = LineCutter()
        self.ended = False
        self.watched = False
        os.set_blocking(self.fd, False)
        self.resume()

    def resume(self) -> None:
        """Read the pipe whenever it has data; a no-op for a stream that is read or has ended."""
        if not self.ended and not self.watched:
            self.watched = True
            self._selector.register(self.fd, selectors.EVENT_READ, self.read)

    def pause(self) -> None:
        """Leave new data in the pipe; a no-op for a stream that is not read."""
        if self.watched:
            self.watched = False
            self._selector.unregister(self.fd)

    def read(self, max_nbytes: int = 1 << 16) -> int:
        """Send the available data, at most `max_nbytes`, and return the number of bytes."""
        # The agent may have drained it since the selector found data.
        if self.ended:
            return 0
        try:
            data = os.read(self.fd, max_nbytes)
        except BlockingIOError:
            return 0
        self._send(self.lines.feed(data) if data else self.lines.end())
        if not data:
            self.pause()
            self.ended = True
            self._pipe.close()
        return len(data)

    def drain(self) -> None:
        """Send all that an ended worker has left in the pipe, also while the stream is paused.

        Children of the worker may hold the pipe open and continue to write, so this neither waits
        for the end of the stream nor reads more than the pipe holds now.
        """
        left = 0 if self.ended else _bytes_in(self.fd)
        while left > 0 and (count := self.read(left)):
            left -= count
        # Detects the end of the stream: a read of an empty, open pipe returns at once.
        if not self.ended and not _bytes_in(self.fd):
            self.read()
        self._send(self.lines.end())

    def _send(self, chunks: list[str]) -> None:
        if chunks:
            self._link.send(Lines(self.rank, self.name, tuple(chunks)))


def _bytes_in(pipe: int) -> int:
    """Return the number of bytes that a pipe holds now."""
    count = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(count, sys.byteorder)
