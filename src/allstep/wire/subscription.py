"""Keys that clients set, for the owner of the store: readable when there are new ones.

The launcher's loop waits on many descriptors. A subscription is one more of them: the thread of the
store writes a byte when a key with the prefix appears, and the loop takes the keys.
"""

import contextlib
import socket
from collections import deque


class Subscription:
    """The keys with a prefix that have appeared since the last `take`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self._keys: deque[bytes] = deque()
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are new keys."""
        return self._reader.fileno()

    def note(self, key: bytes) -> None:
        """Add a key that has appeared, if it has the prefix; called by the thread of the store."""
        if key.startswith(self.prefix):
            self._keys.append(key)
            # A full pipe is readable anyway, and a closed one has no reader any more.
            with contextlib.suppress(OSError):
                self._writer.send(b"x")

    def take(self) -> list[str]:
        """Return the new keys in the order of their appearance."""
        # Emptied before the keys are taken: a key that appears in between makes it readable again.
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                continue
        taken = []
        while self._keys:
            taken.append(self._keys.popleft().decode())
        return taken

    def close(self) -> None:
        """Close the descriptors."""
        self._reader.close()
        self._writer.close()
