"""The bytes that a rank gave to the other ranks, and those that it took from them.

What counts is the payload of an exchange, whatever carries it: gradients, weights, or differences
of weights. In shared memory "sent" is what the others read or add, and "received" what was copied
or written back. Modes with rare exchanges show here what they save.
"""

from collections.abc import Sequence

from torch import Tensor


class Traffic:
    """Bytes since the start; they only grow."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        # The parameters of the last reduction, and their bytes.
        self._last: tuple[set[int], int] = set(), 0

    def add(self, sent: int, received: int) -> None:
        """Count an exchange."""
        self.sent += sent
        self.received += received

    def count(self, parameters: Sequence[Tensor], used: set[int]) -> None:
        """Count a reduction of gradients: ours, and those that came back. used: their numbers."""
        if used != self._last[0]:
            self._last = set(used), sum(parameters[number].nbytes for number in used)
        self.add(self._last[1], self._last[1])
