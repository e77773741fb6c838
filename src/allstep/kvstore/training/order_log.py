"""The order log: one entry for each push, in the order in which pushes are applied (D19).

No push overtakes another (`memory.key_memory.in_turn`), so the order is the same on all units, and
the log is a plain sequence. It is in shared memory, because a killed party must leave its entry
too. The pusher writes it under the lock of the first unit, at the place that the version of that
unit gives:

    | party | serial | start | count | step | read | torn | learning rate of each group ... |

The log begins again at each synchronization point, where the parties read it.
"""

from allstep.kvstore.memory.key_memory import aligned
from allstep.kvstore.training.push import Push

_PARTY, _SERIAL, _START, _COUNT, _STEP, _READ, _TORN, _LRS = range(8)


class OrderLog:
    """Room for `capacity` pushes of an optimizer with `num_groups` parameter groups."""

    def __init__(self, memory: memoryview, capacity: int, num_groups: int) -> None:
        self._line = _LRS + num_groups
        memory = memory[: capacity * self._line * 8]
        self._numbers, self._lrs = memory.cast("q"), memory.cast("d")
        self.capacity = capacity

    @staticmethod
    def nbytes(capacity: int, num_groups: int) -> int:
        """Return the bytes for `capacity` entries."""
        return aligned(capacity * (_LRS + num_groups) * 8)

    def write(self, index: int, serial: int, push: Push) -> None:
        """Write an entry. The caller has locked the first unit."""
        if not 0 <= index < self.capacity:
            raise AssertionError(f"push {index} of a round, the order log has {self.capacity}")
        at = index * self._line
        fields = (push.party, serial, push.start, push.count, push.step, push.read, 0)
        for place, value in enumerate(fields):
            self._numbers[at + place] = value
        for place, lr in enumerate(push.lrs):
            self._lrs[at + _LRS + place] = lr

    def is_of(self, index: int, party: int, serial: int) -> bool:
        """Return whether an entry is that of a party's push `serial`."""
        at = index * self._line
        return (self._numbers[at + _PARTY], self._numbers[at + _SERIAL]) == (party, serial)

    def mark_torn(self, index: int) -> None:
        """Record that the push was not completed."""
        self._numbers[index * self._line + _TORN] = 1

    def read(self, base: int, count: int) -> list[Push]:
        """Return the first `count` pushes. base: the version at which the log began."""
        return [self._entry(index, base) for index in range(count)]

    def _entry(self, index: int, base: int) -> Push:
        at = index * self._line
        party, _, start, count, step, read, torn = self._numbers[at : at + _LRS].tolist()
        lrs = tuple(self._lrs[at + _LRS : at + self._line].tolist())
        return Push(party, start, count, step, read, base + index + 1, lrs, bool(torn))
