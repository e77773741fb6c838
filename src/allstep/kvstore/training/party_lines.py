"""A line of shared memory for each party: what it computes, and how far its push is.

Only the party itself writes its line while it lives; `torn` and, after its loss, `pushing` are
written by others. All numbers have eight bytes, so that a kill leaves each old or new.

    tick       changes whenever `read` or `steps` does: the number that others sleep on
    read       the version of the weights from which it computes; NONE while it computes nothing
    steps      its pushes since the last synchronization point (mode clock)
    pushing    1 + the place of the claim that it pushes; 0 between two pushes
    serial     the number of its push, to recognize the entry in the order log
    index      the place of that entry
    target     what the version of the last unit is when the push is complete; 0 before that unit
    torn       1 if another party found a unit that this one left half updated

**Is a push complete?** The last unit's version decides, since it is one number that the party
writes once (`is_complete`). A claim whose push is complete is never given out again, and one whose
push is not always is, wherever the party was killed.
"""

from allstep.kvstore.rules.gradient_age import NONE
from allstep.process.futex import address_of, wake

TICK, READ, STEPS, PUSHING, SERIAL, INDEX, TARGET, TORN = range(8)
_LINE = 16


class PartyLines:
    """The lines of `size` parties. memory: `nbytes(size)` bytes, zero at first."""

    def __init__(self, memory: memoryview, size: int) -> None:
        self._numbers, self._base = memory.cast("q"), address_of(memory)
        self.size = size

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes for the lines of `size` parties."""
        return size * _LINE * 8

    def get(self, rank: int, field: int) -> int:
        """Return a number of a party's line."""
        return self._numbers[rank * _LINE + field]

    def put(self, rank: int, field: int, value: int) -> None:
        """Set a number of a party's line."""
        self._numbers[rank * _LINE + field] = value

    def announce(self, rank: int, read: int, steps: int) -> None:
        """Set what others wait for, and wake them."""
        self.put(rank, READ, read)
        self.put(rank, STEPS, steps)
        self.put(rank, TICK, self.get(rank, TICK) + 1)
        wake(self.address(rank), self.size)

    def address(self, rank: int) -> int:
        """Return the address of a party's tick."""
        return self._base + (rank * _LINE + TICK) * 8

    def computing(self, ranks: set[int], field: int) -> dict[int, int]:
        """Return a number of those parties that compute a gradient, by rank."""
        return {
            rank: self.get(rank, field) for rank in sorted(ranks) if self.get(rank, READ) != NONE
        }

    def is_complete(self, rank: int, last_version: int) -> bool:
        """Return whether the last push of a lost party is complete.

        last_version: that of the last unit, which the caller has locked.
        """
        target = self.get(rank, TARGET)
        return target != 0 and last_version >= target and not self.get(rank, TORN)
