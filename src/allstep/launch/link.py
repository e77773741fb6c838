"""The channel between launcher and agent: one message per line (`messages` has their kinds).

It is a socket pair to an agent on this host, and ssh's standard streams to an agent on another
host; nothing else differs. Reading and writing never block: bytes that cannot be written yet wait
in `outbox`, so a cut cable stops neither side. Text that is not UTF-8 is sent as surrogate escapes.
A login shell may print a banner first: output before the hello is noise and is skipped, with or
without an end of line.
"""

import os
import threading
from collections.abc import Iterator

from allstep.launch.messages import START, BadMessage, Channel, Message, decode, encode
from allstep.process.pipe import chunks_now

# Bytes in the outbox at which a sender should stop producing.
FULL = 4 << 20
# Bytes kept of an unfinished line before the first message, and bytes that errors quote.
_MAX_NOISE = 1 << 20
_MAX_SHOWN = 80


class Link:
    """One end of the channel. `read_fd` and `write_fd` may be the same socket.

    receives: the kinds of message that this end accepts.
    """

    def __init__(self, read_fd: int, write_fd: int, receives: Channel) -> None:
        self.receives = receives
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.outbox = bytearray()
        self.ended = False
        self._lock = threading.Lock()
        self._is_closed = False
        self._inbox = bytearray()
        # The start of the output before the first message.
        self.noise = b""
        self._has_received = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: Message) -> None:
        """Queue a message and write as much as the channel accepts now."""
        line = encode(message) + b"\n"
        with self._lock:
            self.outbox += line
        self.flush()

    def flush(self) -> None:
        """Write as much as the channel accepts now; drop everything if it is closed."""
        try:
            with self._lock:
                if not self._is_closed:
                    self._write()
        except BlockingIOError:
            return
        except OSError:
            self.outbox.clear()

    def _write(self) -> None:
        while self.outbox:
            del self.outbox[: os.write(self.write_fd, self.outbox[: 1 << 16])]

    def close(self) -> None:
        """Use the descriptors no more, from any thread: they may be closed and reused now."""
        with self._lock:
            self._is_closed = True
            self.outbox.clear()

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived; BadMessage for one that is not understood.

        Sets `ended` if the other side has closed the channel. Other lines are skipped.
        """
        self._fill()
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = rest if self._has_received else rest[-_MAX_NOISE:]
        for line in lines:
            message = self._message_in(bytes(line))
            if message is not None:
                yield message

    def _message_in(self, line: bytes) -> Message | None:
        """Return the message in a line; None for noise."""
        start = 0 if self._has_received else line.find(START)
        if start >= 0 and line.startswith(START, start):
            try:
                message = decode(line[start:], self.receives)
            except BadMessage as bad:
                # A banner may begin like a message; a line with a kind is a message.
                if self._has_received or bad.kind:
                    raise
            else:
                self._has_received = True
                return message
        if not self._has_received and len(self.noise) < _MAX_SHOWN:
            self.noise = (self.noise + line + b"\n")[:_MAX_SHOWN]
        return None

    def what_came(self) -> str:
        """Return a quote of what came instead of a first message; "" if nothing came."""
        begins = self.noise.rstrip() or bytes(self._inbox[:_MAX_SHOWN])
        return f"it printed {ascii(begins)[1:]}" if begins else ""

    def _fill(self) -> None:
        """Read the available bytes into the inbox."""
        if self._is_closed:
            self.ended = True
            return
        try:
            for chunk in chunks_now(self.read_fd):
                self._inbox += chunk
                if not chunk:
                    self.ended = True
        except OSError:
            self.ended = True
