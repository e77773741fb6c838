"""Modes async and stale: the worker that has a gradient applies it itself (D16).

There is no server process, no thread and no message. For each slice: lock, update, copy the new
weights to the pusher's own tensor (that is the pull, while the slice is in cache), unlock. Workers
that push the same key follow each other through its slices, as in a pipeline.

A worker that is lost stops no other worker: its pushes end, its locks are freed by the kernel.

**Mode stale** bounds the age of gradients (`rules.gradient_age`). Each worker keeps in its line the
version that it has read and for which it has not pushed a gradient yet:

    pull, pushpull     the version of the value that it returns
    init               0
    push               none
    barrier            none while it waits, because a worker that waits pushes nothing

A push waits, without a lock, while it would make another worker's gradient too old. The state of a
worker that is lost does not count.
"""

from collections.abc import Sequence

from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import Admission, Slice, StoredKey, in_turn
from allstep.kvstore.memory.row_batches import batches_in_turn
from allstep.kvstore.modes.shared_values import SharedValues
from allstep.kvstore.rules.gradient_age import NONE, blocker, in_time, max_age
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.key_optimizer import KeyOptimizer, apply_slice
from allstep.kvstore.updates.row_updates import Rows, apply_rows, check_rows

# The numbers in a worker's line: the version that it has read, and the one before the barrier.
_READ, _BEFORE = 0, 1


class EachPush(SharedValues):
    """Mode async: each push is an update; implements `KeyValues`."""

    needs_all = False

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Apply a gradient slice by slice."""
        self._apply(stored, gradient, ())

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        """Apply a gradient, and copy each slice to `outs` before the next one."""
        self._apply(stored, gradient, outs)

    def _apply(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        optimizer = self._optimizer(stored)
        for each in in_turn(stored, self._caller, "push"):
            apply_slice(optimizer, each, each.of(gradient))
            self.copy_slice(stored, each, outs)

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Apply rows of a gradient."""
        self._apply_rows(stored, rows, None)

    def _apply_rows(self, stored: StoredKey, rows: Rows, admission: Admission | None) -> None:
        optimizer = self._optimizer(stored)
        check_rows(stored, self.chosen)
        for batch in batches_in_turn(stored, self._caller, "push", admission):
            apply_rows(stored, optimizer, batch, rows)
            if not batch[0].index:
                self.has_pushed(stored, batch[0])

    def has_pushed(self, stored: StoredKey, first: Slice) -> None:
        """Note a push after which the value is not read; for modes that bound ages."""

    def _optimizer(self, stored: StoredKey) -> KeyOptimizer:
        optimizer = self.optimizers.get(stored.key)
        if optimizer is None:
            raise UserError(
                f"push of key {stored.key!r}: a {self.kind.name!r} store updates at each push and"
                " has no optimizer yet; call set_optimizer first"
            )
        return optimizer


class BoundedAge(EachPush):
    """Mode stale: as async, but no gradient older than `kind.rounds` rounds is applied."""

    def __init__(self, kind: StoreKind) -> None:
        super().__init__(kind)
        self.bound = max_age(kind.rounds, self.num_workers)
        self.lost: set[int] = set()
        # By key: the version of the weights that this worker has, less its own pushes since.
        self.read: dict[Key, int] = {}

    def has_read(self, stored: StoredKey, version: int) -> None:
        """Note that this worker computes its next gradient from this version."""
        self.read[stored.key] = version
        self.set_number(stored, _READ, version)

    def _apply(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        optimizer = self._optimizer(stored)
        admission = _Admission(self, stored)
        for each in in_turn(stored, self._caller, "push", admission):
            apply_slice(optimizer, each, each.of(gradient))
            self.copy_slice(stored, each, outs)
            if not each.index:
                self._note_push(stored, each, bool(outs))

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Apply rows of a gradient, once it makes no other worker's gradient too old."""
        self._apply_rows(stored, rows, _Admission(self, stored))

    def _note_push(self, stored: StoredKey, first: Slice, has_read: bool) -> None:
        if has_read:
            self.has_read(stored, first.num_updates)
        else:
            self.has_pushed(stored, first)

    def has_pushed(self, stored: StoredKey, first: Slice) -> None:
        """Note a push: this worker's own update makes its next gradient no older."""
        self.read[stored.key] += 1
        self.set_number(stored, _READ, NONE)

    def reads(self, stored: StoredKey, field: int = _READ) -> dict[int, int]:
        """Return the versions that the workers that are not lost have read, by rank."""
        return {
            rank: stored.workers[stored.number(rank, field)]
            for rank in range(self.num_workers)
            if rank not in self.lost
        }

    def barrier(self) -> None:
        """Wait until all living workers have called this. No push waits for them."""
        for stored in self.keys.values():
            self.set_number(stored, _BEFORE, stored.workers[stored.number(self.rank, _READ)])
            self.set_number(stored, _READ, NONE)
        self.lost |= self.parties.barrier(needs_all=False)
        # No worker pushes until all of them have left the second barrier.
        for stored in self.keys.values():
            before, version = self.reads(stored, _BEFORE), stored.slices[0].num_updates
            if self.rank in in_time(version, before, self.bound):
                self.set_number(stored, _READ, before[self.rank])
        self.lost |= self.parties.barrier(needs_all=False)


class _Admission:
    """Admits one push of mode stale, under the lock of the first slice."""

    def __init__(self, values: BoundedAge, stored: StoredKey) -> None:
        self._values, self._stored = values, stored
        self._waiting = values.parties.waiting(f"push of key {stored.key!r}")

    def blocker(self, first: Slice) -> int | None:
        """Return the worker whose gradient would become too old, or None."""
        values, stored = self._values, self._stored
        age = first.num_updates - values.read[stored.key]
        reads = values.reads(stored)
        others = {p: read for p, read in reads.items() if p != values.rank and read != NONE}
        found = blocker(first.num_updates, others, values.bound)
        if found is None and age > values.bound:
            raise UserError(
                f"push of key {stored.key!r}: the gradient is {age} updates old, the limit of"
                f" {values.kind.name!r} with {values.num_workers} workers is {values.bound};"
                " pull the key before its next push"
            )
        return found

    def wait(self, peer: int) -> None:
        """Wait until that worker has pushed, or is lost."""
        at = self._stored.number(peer, _READ)
        seen = self._stored.workers[at]
        if seen != NONE and not self._waiting.nap(self._stored.address(at), seen, peer):
            self._values.lost.add(peer)
