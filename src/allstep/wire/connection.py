"""The server's connection to one client: buffers of received and unsent bytes, without policy."""

import selectors
import socket

from allstep.wire.frames import LENGTH, MAX_FRAME
from allstep.wire.signatures import TAG_NBYTES, Signatures

# Bytes of one read. A request has a few hundred.
_CHUNK = 1 << 16


class Connection:
    """A non-blocking socket with an inbox (received bytes) and an outbox (unsent bytes).

    worker: the name of the client's ticket, "" without one. signatures: of all frames, if signed.
    """

    def __init__(
        self, sock: socket.socket, worker: str = "", signatures: Signatures | None = None
    ) -> None:
        self.sock = sock
        self.worker = worker
        self._signatures = signatures
        self._max_nbytes = MAX_FRAME if signatures is None else MAX_FRAME + TAG_NBYTES
        self.inbox = bytearray()
        self.outbox = bytearray()
        # State of the server: the selector events it waits for, the bytes of the last request, the
        # bytes counted as held by this connection, and the time since which these are many.
        self.events = 0
        self.request_nbytes = 0
        self.held = 0
        self.held_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether only a read is awaited, both buffers are empty and no byte is counted."""
        return self.events == selectors.EVENT_READ and not (self.inbox or self.outbox or self.held)

    def receive(self) -> bool:
        """Read available bytes into the inbox; return False if the client closed the connection."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return True
        self.inbox += data
        return bool(data)

    def has_frame(self) -> bool:
        """Return whether the inbox has a whole frame; ValueError if it is too long."""
        if len(self.inbox) < LENGTH.size:
            return False
        size: int = LENGTH.unpack_from(self.inbox)[0]
        if size > self._max_nbytes:
            raise ValueError(f"a frame of {size} bytes; expected at most {self._max_nbytes}")
        return len(self.inbox) >= LENGTH.size + size

    def take_frame(self) -> bytes:
        """Remove the first frame from the inbox and return its body. Requires `has_frame()`.

        Raises ForgedFrame for a wrong signature.
        """
        end = LENGTH.size + LENGTH.unpack_from(self.inbox)[0]
        body = bytes(memoryview(self.inbox)[LENGTH.size : end])
        del self.inbox[:end]
        return body if self._signatures is None else self._signatures.received.check(body)

    def send(self, frame: bytes) -> None:
        """Sign and send a frame; what the kernel does not accept now goes to the outbox."""
        if self._signatures is not None:
            frame = self._signatures.sent.sign(frame)
        if self.outbox:
            self.outbox += frame
            return
        try:
            sent = self.sock.send(frame)
        except BlockingIOError:
            sent = 0
        if sent < len(frame):
            self.outbox += memoryview(frame)[sent:]

    def flush(self) -> None:
        """Send as much of the outbox as the kernel accepts now."""
        try:
            while self.outbox:
                sent = self.sock.send(self.outbox)
                del self.outbox[:sent]
        except BlockingIOError:
            return
