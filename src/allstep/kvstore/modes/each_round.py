"""Mode sync: one update per round, of the sum of all workers' gradients.

Each worker copies its gradient to its contribution in shared memory and counts its pushes of the
key. A round is complete when all workers have pushed. The workers that then pull share the work:
each starts at another slice, updates those that no worker has updated yet, and copies the value.

* The contributions are added in rank order, so the bits do not depend on which worker came first.
* A pull returns the value after the round of this worker's last push. No worker can be a round
  ahead, since a round needs the push of every worker.
* A second push without a pull waits for the first round, whose contribution it replaces.

* Workers may push some rows of a matrix. If all of them do, only these rows are updated
  (`updates.row_updates`); a dense gradient among them makes the round dense.

A lost worker ends the store with PeerLost: the rounds cannot be completed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from allstep.kvstore.memory.key_memory import Slice, StoredKey
from allstep.kvstore.memory.row_batches import Batch, lock, row_batches, rows_of, unlock
from allstep.kvstore.modes.shared_values import SharedValues
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.key_optimizer import apply_slice, plain_sum
from allstep.kvstore.updates.row_updates import (
    Rows,
    apply_rows,
    check_rows,
    dense_slice,
    sum_of_rows,
)
from allstep.process.futex import new_fence

# The numbers in a worker's line: its pushes of this key, thus its rounds; the rows in its
# contribution, plus one, or 0 if that is dense.
_PUSHES, _ROWS = 0, 1


class EachRound(SharedValues):
    """Mode sync: an update once all workers have pushed; implements `KeyValues`."""

    sums = True

    def __init__(self, kind: StoreKind, members: Sequence[int] = ()) -> None:
        super().__init__(kind, members)
        self._fence = new_fence()
        self._scratch: dict[torch.dtype, Tensor] = {}

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Contribute to the next round, once the last one is complete."""
        number = self._begin(stored)
        stored.contributions[self.parties.rank].copy_(gradient)
        self._contributed(stored, number, 0)

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Contribute rows to the next round, once the last one is complete."""
        check_rows(stored, self.chosen)
        number, num_rows = self._begin(stored), rows.numbers.numel()
        stored.contributed_rows[self.parties.rank][:num_rows].copy_(rows.numbers)
        values = rows.values.reshape(-1)
        stored.contributions[self.parties.rank][: values.numel()].copy_(values)
        self._contributed(stored, number, num_rows + 1)

    def _begin(self, stored: StoredKey) -> int:
        """Complete the last round, and return the number of this worker's rounds so far."""
        number = self._round(stored)
        if any(each.num_updates < number for each in stored.slices):
            self._finish(stored, number, ())
        return number

    def _contributed(self, stored: StoredKey, number: int, rows: int) -> None:
        stored.workers[stored.number(self.parties.rank, _ROWS)] = rows
        self._fence()
        self.set_number(stored, _PUSHES, number + 1)

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows of the value after the round of this worker's last push."""
        self._finish(stored, self._round(stored), ())
        return super().rows(stored, numbers)

    def pull(self, stored: StoredKey, outs: Sequence[Tensor]) -> None:
        """Wait for the round of this worker's last push, and copy the value."""
        self._finish(stored, self._round(stored), outs)

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        """Contribute, wait for the round and copy the value."""
        self.push(stored, gradient)
        self.pull(stored, outs)

    def locked(self, stored: StoredKey) -> AbstractContextManager[None]:
        """Let no worker change the value, after the round of this worker's last push."""
        self._finish(stored, self._round(stored), ())
        return super().locked(stored)

    def _round(self, stored: StoredKey) -> int:
        """Return the number of rounds to which this worker has contributed."""
        return stored.workers[stored.number(self.parties.rank, _PUSHES)]

    def _finish(self, stored: StoredKey, number: int, outs: Sequence[Tensor]) -> None:
        """Wait for round `number`, make the updates of it that are left, and copy the value."""
        self._wait_for_pushes(stored, number)
        if any(self._rows_in(stored, rank) is not None for rank in range(self.parties.size)):
            self._finish_rows(stored, number)
        slices = stored.slices
        first = self.parties.rank * len(slices) // self.parties.size
        for each in (*slices[first:], *slices[:first]):
            each.acquire(self._caller, "pull")
            try:
                if each.num_updates < number:
                    self._update(stored, each)
                self.copy_slice(stored, each, outs)
            finally:
                each.release()

    def _finish_rows(self, stored: StoredKey, number: int) -> None:
        """Make the updates that are left of a round to which some workers contributed rows.

        A contribution may already be that of the next round. Then no update is left of this one.
        """
        batches = row_batches(stored)
        first = self.parties.rank * len(batches) // self.parties.size
        for batch in (*batches[first:], *batches[:first]):
            lock(batch, self._caller, "pull")
            try:
                if batch[0].num_updates < number:
                    self._update_batch(stored, batch)
            finally:
                unlock(batch)

    def _update_batch(self, stored: StoredKey, batch: Batch) -> None:
        """Update a locked batch: only rows, if all workers contributed rows."""
        found = [self._rows_in(stored, rank) for rank in range(self.parties.size)]
        contributed = [rows for rows in found if rows is not None]
        if len(contributed) < len(found):
            for each in batch:
                self._update(stored, each)
            return
        total = sum_of_rows(contributed, *rows_of(batch, stored.form.width))
        apply_rows(stored, self.optimizers.get(stored.key), batch, total)

    def _rows_in(self, stored: StoredKey, rank: int) -> Rows | None:
        """Return the rows that a worker has contributed; None if it has contributed all."""
        num_rows = stored.workers[stored.number(rank, _ROWS)] - 1
        if num_rows < 0:
            return None
        values = stored.contributions[rank][: num_rows * stored.form.width]
        numbers = stored.contributed_rows[rank][:num_rows]
        return Rows(numbers, values.view(num_rows, stored.form.width))

    def _part(self, stored: StoredKey, rank: int, each: Slice) -> Tensor:
        """Return a worker's contribution to a slice, dense."""
        rows = self._rows_in(stored, rank)
        if rows is None:
            return stored.contributions[rank][each.start : each.end]
        return dense_slice(rows, stored.form.width, each.start, each.end)

    def _wait_for_pushes(self, stored: StoredKey, number: int) -> None:
        """Wait until all workers have contributed to round `number`."""
        workers = stored.workers
        for rank in range(self.parties.size):
            at = stored.number(rank, _PUSHES)
            if workers[at] >= number:
                continue
            waiting = self.parties.waiting(f"pull of key {stored.key!r}")
            while (seen := workers[at]) < number:
                if not waiting.nap(stored.address(at), seen, rank) and workers[at] < number:
                    raise waiting.lost(rank)
        self._fence()

    def _update(self, stored: StoredKey, each: Slice) -> None:
        """Update one locked slice with the sum of the contributions, in rank order."""
        optimizer = self.optimizers.get(stored.key)
        dtype = stored.dtype if optimizer is None else optimizer.plan.dtype
        parts = [self._part(stored, rank, each) for rank in range(self.parties.size)]
        total = parts[0] if len(parts) == 1 else self._sum(parts, dtype)
        if optimizer is None:
            each.begin()
            plain_sum(stored, each, total)
            each.finish()
        else:
            apply_slice(optimizer, each, total)

    def _sum(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the sum of `parts` in this order, in memory that the next sum overwrites."""
        numel = parts[0].numel()
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < numel:
            # New memory for each sum would cost more than the sum.
            scratch = self._scratch[dtype] = torch.empty(numel, dtype=dtype)
        total = scratch[:numel].copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        return total
