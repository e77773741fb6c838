"""The undo copy of shared weights: an update that not every owner finished is undone.

A worker of an elastic run may be killed within its update. The weights that it owns are then
neither old nor new, and those of the other owners are new already. So each owner copies its ranges
of weights and state before it changes them, and writes the number of the update:

```
owner      copy its ranges │ begun = n │ change weights and state │ meet
                                                                  all ranks: n updates are finished
```

A rank that leaves its world has finished m updates: it has passed the meeting of update m. It
takes, of each owner, the state after update m (`must_undo`):

```
begun = m        the owner has not begun the next update: the present content
begun = m + 1    it has begun it, whether it finished, died or still works: the undo copy
```

No other number is possible: update m + 1 needs the gradients of all ranks, so no owner begins m + 2
before this rank has passed the meeting of m + 1.

So each survivor gets the whole state of its own number of updates, which is the number that it
reports to the launcher. It decides alone and at any time, and need not know which ranks are dead:

- An owner that is stopped, not dead, may continue while this rank reads. It writes the number
  before it changes anything. This rank reads the content first and the number after it, with a
  fence between them (`Undo.is_undone`): if the number is still m, what it has read is whole.
- An undo copy is not overwritten before update m + 2.
- What the owner writes later is in memory that no rank uses again: the next world makes its own.

One survivor may have passed the meeting that another one fails at. They are then one update apart,
like the ranks of any elastic run: the rank that is behind receives the state of the other (D15).
"""

from allstep.errors import CommError
from allstep.process.futex import new_fence

# Numbers of 8 bytes for each rank: 128 bytes, so that no two ranks share a cache line.
_LINE = 16


def number_bytes(size: int) -> int:
    """Return the bytes of the numbers of `size` ranks."""
    return size * _LINE * 8


def must_undo(begun: int, finished: int) -> bool:
    """Return whether a rank takes the undo copy of an owner's ranges, and not their content.

    `begun` is the number of the last update that the owner has begun, `finished` of the last one
    that the rank has finished.
    """
    if begun not in (finished, finished + 1):
        raise CommError(
            f"share_weights: a rank has begun update {begun} while this one has finished"
            f" {finished}: the weights cannot be restored"
        )
    return begun > finished


class Undo:
    """The numbers of the updates that the ranks of the host have begun, seen from one of them.

    `numbers`: shared memory of `number_bytes`, zero at first. `rank`: our number on the host.
    """

    def __init__(self, numbers: memoryview, rank: int) -> None:
        self._numbers = numbers.cast("q")
        self._mine = rank * _LINE
        self._fence = new_fence()
        # The updates that this rank has finished, together with all others.
        self.finished = 0

    def begin(self) -> None:
        """Record that our ranges change from now on; their undo copy is complete."""
        self._fence()
        self._numbers[self._mine] = self.finished + 1
        self._fence()

    def finish(self) -> None:
        """Record that all ranks have finished the update."""
        self.finished += 1

    def is_undone(self, owner: int) -> bool:
        """Return whether to take the undo copy of the ranges of rank `owner` of the host.

        Called after their content has been read: otherwise the owner may change it meanwhile.
        """
        self._fence()
        return must_undo(self._numbers[owner * _LINE], self.finished)
