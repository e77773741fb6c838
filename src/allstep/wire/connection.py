"""One client of the store: bytes that came and bytes to go. It decides nothing."""

import selectors
import socket

from allstep.wire.frames import LENGTH, MAX_FRAME

# Read at a time. A request is a few hundred bytes.
_PIECE = 1 << 16


class Connection:
    """A non-blocking socket with an inbox and an outbox."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        # For the server: what it waits for at this socket, the length of the last request, how many
        # bytes it has counted here, and since when these are many.
        self.events = 0
        self.request_nbytes = 0
        self.held = 0
        self.held_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it is only waited for, with nothing in the boxes or counted."""
        return self.events == selectors.EVENT_READ and not (self.inbox or self.outbox or self.held)

    def receive(self) -> bool:
        """Take what has come into the inbox; False when the client is gone."""
        try:
            data = self.sock.recv(_PIECE)
        except BlockingIOError:
            return True
        self.inbox += data
        return bool(data)

    def has_frame(self) -> bool:
        """Whether a whole frame is in the inbox; ValueError when it is longer than any may be."""
        if len(self.inbox) < LENGTH.size:
            return False
        size: int = LENGTH.unpack_from(self.inbox)[0]
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME} are taken here")
        return len(self.inbox) >= LENGTH.size + size

    def take_frame(self) -> bytes:
        """The body of the first frame, which `has_frame`."""
        end = LENGTH.size + LENGTH.unpack_from(self.inbox)[0]
        body = bytes(memoryview(self.inbox)[LENGTH.size : end])
        del self.inbox[:end]
        return body

    def send(self, frame: bytes) -> None:
        """Send a frame, or put what the kernel does not take now into the outbox."""
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
        """Send of the outbox what the kernel takes now."""
        try:
            while self.outbox:
                sent = self.sock.send(self.outbox)
                del self.outbox[:sent]
        except BlockingIOError:
            return
