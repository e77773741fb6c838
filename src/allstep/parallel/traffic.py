"""The bytes that a rank gave to the other ranks, and those that it took from them.

What counts is the payload of an exchange, whatever carries it: gradients, weights, or differences
of weights. In shared memory "sent" is what the others read or add, and "received" what was copied
or written back. Modes with rare exchanges show here what they save.
"""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes since the start; they only grow."""

    sent: int = 0
    received: int = 0

    def add(self, sent: int, received: int) -> None:
        """Count an exchange."""
        self.sent += sent
        self.received += received
