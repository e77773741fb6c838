"""Messages, one a line, between the launcher and the agent on a host. `messages` knows the kinds.

The channel is a socket pair to the agent on this host and ssh's standard streams to the others;
nothing else differs. Reading and writing never block: what cannot be written yet waits in `outbox`,
so a cut cable stops nobody's clock. Text that is not UTF-8 travels as surrogate escapes. A login
shell may print a greeting first: what comes before the hello is noise and is skipped, with or
without an end of line.
"""

import os
import threading
from collections.abc import Iterator

from allstep.launch.messages import START, BadMessage, Channel, Message, decode, encode
from allstep.process.pipe import chunks_now

FULL = 4 << 20  # bytes in the outbox at which a sender should stop producing

# Bytes that are kept of a line without an end before the first message, and bytes that errors show.
_MAX_NOISE = 1 << 20
_MAX_SHOWN = 80


class Link:
    """One end. `read_fd` and `write_fd` may be the same socket. `receives`: what may come."""

    def __init__(self, read_fd: int, write_fd: int, receives: Channel) -> None:
        self.receives = receives
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.outbox = bytearray()
        self.ended = False
        self._lock = threading.Lock()
        self._inbox = bytearray()
        # How what came before the first message begins.
        self.noise = b""
        self._has_received = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(self, message: Message) -> None:
        """Queue a message and write as much as the channel takes now."""
        line = encode(message) + b"\n"
        with self._lock:
            self.outbox += line
        self.flush()

    def flush(self) -> None:
        """Write what the channel takes; a channel that is gone swallows the rest."""
        try:
            with self._lock:
                self._write()
        except BlockingIOError:
            return
        except OSError:
            self.outbox.clear()

    def _write(self) -> None:
        while self.outbox:
            del self.outbox[: os.write(self.write_fd, self.outbox[: 1 << 16])]

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have come; BadMessage for one that is not understood.

        Sets `ended` when the other side is gone. Lines that are no messages are skipped.
        """
        self._fill()
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = rest if self._has_received else rest[-_MAX_NOISE:]
        for line in lines:
            message = self._message_in(bytes(line))
            if message is not None:
                yield message

    def _message_in(self, line: bytes) -> Message | None:
        start = 0 if self._has_received else line.find(START)
        if start >= 0 and line.startswith(START, start):
            try:
                message = decode(line[start:], self.receives)
            except BadMessage as bad:
                # A greeting may begin like a message; what names a kind is one.
                if self._has_received or bad.kind:
                    raise
            else:
                self._has_received = True
                return message
        if not self._has_received and len(self.noise) < _MAX_SHOWN:
            self.noise = (self.noise + line + b"\n")[:_MAX_SHOWN]
        return None

    def what_came(self) -> str:
        """Return what came instead of a first message, for an error about that; "" when nothing
        came."""
        begins = self.noise.rstrip() or bytes(self._inbox[:_MAX_SHOWN])
        return f"it printed {ascii(begins)[1:]}" if begins else ""

    def _fill(self) -> None:
        try:
            for chunk in chunks_now(self.read_fd):
                self._inbox += chunk
                if not chunk:
                    self.ended = True
        except OSError:
            self.ended = True
