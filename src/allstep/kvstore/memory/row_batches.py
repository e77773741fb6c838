"""Slices of a matrix in batches of whole rows, for pushes and pulls of some of its rows.

The rows of an embedding's gradient are scattered over all slices. One update for each slice would
cost more than the rows themselves, so neighboring slices form a batch and are locked together.
There are several batches, so that workers follow each other through a table.

A push visits all batches, those without its rows too: versions stay equal over the slices, no
worker overtakes another one, and a pull returns rows between two updates.
"""

from collections.abc import Iterator, Sequence

from allstep.kvstore.memory.key_memory import Admission, Caller, Slice, StoredKey

_BATCHES = 8

Batch = Sequence[Slice]
"""Slices that follow each other, from the beginning of a row to the end of one."""


def row_batches(stored: StoredKey) -> Sequence[Batch]:
    """Return the batches of a key, in order."""
    stored.batches = stored.batches or _cut(stored)
    return stored.batches


def _cut(stored: StoredKey) -> list[Batch]:
    slices, width = stored.slices, max(1, stored.form.width)
    size = -(-len(slices) // _BATCHES)
    found: list[Batch] = []
    batch: list[Slice] = []
    for each in slices:
        batch.append(each)
        if len(batch) >= size and each.end % width == 0:
            found.append(batch)
            batch = []
    return [*found, batch] if batch else found


def rows_of(batch: Batch, width: int) -> tuple[int, int]:
    """Return the first row of a batch, and the one after its last."""
    return batch[0].start // max(1, width), batch[-1].end // max(1, width)


def lock(batch: Batch, caller: Caller, call: str) -> None:
    """Lock the slices of a batch, or none of them."""
    held = []
    try:
        for each in batch:
            each.acquire(caller, call)
            held.append(each)
    except BaseException:
        unlock(held)
        raise


def unlock(batch: Batch) -> None:
    """Unlock the slices of a batch."""
    for each in batch:
        each.release()


def batches_in_turn(
    stored: StoredKey, caller: Caller, call: str, admission: Admission | None = None
) -> Iterator[Batch]:
    """Yield each batch of a key, locked; lock the next one before the last one is unlocked.

    As `key_memory.in_turn`. call: what the caller does, for reports. admission: may delay it.
    """
    held: Batch = ()
    try:
        for batch in row_batches(stored):
            lock(batch, caller, call)
            unlock(held)
            held = batch
            first = batch[0]
            while admission and not first.index and (peer := admission.blocker(first)) is not None:
                unlock(held)
                held = ()
                admission.wait(peer)
                lock(batch, caller, call)
                held = batch
            yield batch
    finally:
        unlock(held)
