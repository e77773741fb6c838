"""A line of JSON each way between the launcher and the agent on a host.

The channel is a socket pair to the agent on this host and ssh's standard streams to the others; nothing else differs. Reading and
writing never block: what cannot be written yet waits in `outbox`, so a cut cable stops nobody's clock. Text that is not UTF-8
travels as surrogate escapes. A login shell may print a greeting first: what comes before the hello is noise and is skipped, with or
without an end of line.
"""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
FULL = 4 << 20  # bytes in the outbox at which a sender should stop producing

_START = b'{"kind":'
# Bytes that are kept of a line without an end before the first message, and bytes that errors show.
_MAX_NOISE = 1 << 20
_MAX_SHOWN = 80


class Link:
    """One end. `read_fd` and `write_fd` may be the same socket."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
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

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message and write as much as the channel takes now."""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
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
        """The messages that have come. Sets `ended` when the other side is gone."""
        self._fill()
        *lines, rest = self._inbox.split(b"\n")
        self._inbox = rest if self._has_received else rest[-_MAX_NOISE:]
        for line in lines:
            start = 0 if self._has_received else max(0, line.find(_START))
            message = _parse(bytes(line[start:]))
            if message is not None:
                self._has_received = True
                yield message
            elif not self._has_received and len(self.noise) < _MAX_SHOWN:
                self.noise = (self.noise + line + b"\n")[:_MAX_SHOWN]

    def what_came(self) -> str:
        """Return what came instead of a first message, for an error about that; "" when nothing came."""
        begins = self.noise.rstrip() or bytes(self._inbox[:_MAX_SHOWN])
        return f"it printed {ascii(begins)[1:]}" if begins else ""

    def _fill(self) -> None:
        """Read at most 1 MB: a peer that writes without end must neither block the caller nor fill the memory."""
        try:
            for _ in range(16):
                chunk = os.read(self.read_fd, 1 << 16)
                if not chunk:
                    self.ended = True
                    return
                self._inbox += chunk
        except BlockingIOError:
            return
        except OSError:
            self.ended = True


def _parse(line: bytes) -> Message | None:
    if not line.startswith(_START):
        return None
    try:
        message: Message = json.loads(line)
    except ValueError:
        return None
    return message
