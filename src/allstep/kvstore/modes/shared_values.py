"""Values in the memory that the workers of a host share: keys, optimizer, pull, barrier.

The base of the modes sync, async and stale, which differ in what a push does.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.memory.key_memory import (
    Caller,
    KeyShape,
    Slice,
    StoredKey,
    aligned,
    all_locked,
    in_turn,
    short,
)
from allstep.kvstore.memory.parties import Parties
from allstep.kvstore.memory.row_batches import batches_in_turn, rows_of
from allstep.kvstore.memory.slice_locks import SliceLocks
from allstep.kvstore.modes.key_values import Updater
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.key_optimizer import KeyOptimizer, StatePlan, may_keep_state
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows, table_of
from allstep.kvstore.updates.states_file import (
    Expected,
    Named,
    expected_state,
    put_state,
    whole_state,
)
from allstep.process.futex import wake


class SharedValues:
    """What the modes in shared memory have in common. All workers create it together."""

    needs_all = True
    """Whether the store cannot continue without a worker that is lost."""
    sums = False
    """Whether each worker has a contribution to each key."""
    sends = False

    def __init__(self, kind: StoreKind, members: Sequence[int] = ()) -> None:
        self.kind = kind
        self.parties = Parties(f"kvstore.create({kind.name!r})", members)
        try:
            self._locks = SliceLocks(self.parties)
        except BaseException:
            self.parties.close()
            raise
        self.rank, self.num_workers = self.parties.rank, self.parties.size
        self.keys: dict[Key, StoredKey] = {}
        self.optimizers: dict[Key, KeyOptimizer] = {}
        self.chosen: OptimizerClass | None = None
        self._caller = Caller(self.rank, self.parties.waiting)

    # Keys

    def add(self, values: Mapping[Key, Tensor]) -> None:
        """Store new keys with the values of rank 0."""
        forms = [KeyShape(key, tuple(each.shape), each.dtype) for key, each in values.items()]
        self._check_same("init", [_described(form) for form in forms])
        added = self.stored_keys(forms)
        if self.parties.rank == 0:
            for stored in added:
                stored.flat.copy_(values[stored.key].reshape(-1))
        for stored in added:
            self.has_read(stored, 0)
        self.parties.barrier(needs_all=True)
        self.keys.update({stored.key: stored for stored in added})
        if self.chosen is not None:
            self._attach(added, self.chosen)

    def stored_keys(self, forms: Sequence[KeyShape]) -> list[StoredKey]:
        """Return new keys in memory that the workers of this host share."""
        ends = [self._end(form) for form in forms]
        memory, at, made = self.parties.allocate(sum(ends)), 0, []
        for form, nbytes in zip(forms, ends, strict=True):
            made.append(self._stored(form, memory[at : at + nbytes]))
            at += nbytes
        return made

    def _end(self, form: KeyShape) -> int:
        return form.place(self.parties.size, self._num_contributions).end

    @property
    def _num_contributions(self) -> int:
        return self.parties.size if self.sums else 0

    def _stored(self, form: KeyShape, memory: memoryview) -> StoredKey:
        return StoredKey(form, memory, self._locks.at, self.parties.size, self._num_contributions)

    def _check_same(self, call: str, own: Sequence[str]) -> None:
        """Raise UserError on all workers if they pass different texts."""
        found = [json.loads(text) for text in self.parties.collect(call, json.dumps(own))]
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise UserError(
                    f"{call}: rank 0 passes {_first_difference(found[0], theirs)}, rank {rank}"
                    f" passes {_first_difference(theirs, found[0])}; pass the same on all workers"
                )

    # Optimizer

    def set_optimizer(self, chosen: OptimizerClass) -> None:
        """Update with this optimizer; keep the state if only settings have changed."""
        plans = {key: StatePlan(chosen, stored.form) for key, stored in self.keys.items()}
        self._check_same("set_optimizer", [chosen.to_json()])
        if may_keep_state(self.optimizers, self.chosen, chosen, plans):
            for optimizer in self.optimizers.values():
                optimizer.use_settings(chosen)
        else:
            self.optimizers = {}
            self._attach(list(self.keys.values()), chosen)
        self.chosen = chosen
        self.parties.barrier(needs_all=True)

    def _attach(self, added: Sequence[StoredKey], chosen: OptimizerClass) -> None:
        """Make the optimizers of these keys, with their state in shared memory."""
        plans = [StatePlan(chosen, stored.form) for stored in added]
        memory, at = self.parties.allocate(sum(_room(plan) for plan in plans)), 0
        for stored, plan in zip(added, plans, strict=True):
            made = KeyOptimizer(stored, chosen, plan, memory[at : at + _room(plan)])
            at += _room(plan)
            if self.parties.rank == 0:
                made.copy_to_master()
                for each in stored.slices:
                    each.has_state = False
            self.optimizers[stored.key] = made
        self.parties.barrier(needs_all=True)

    def set_updater(self, updater: Updater) -> None:
        """Raise UserError: a function of one worker cannot update what all workers share."""
        raise UserError(
            f"set_updater: the workers of a {self.kind.name!r} store share their values, so the"
            " update must be the same on all of them; use set_optimizer, or a 'local' store"
        )

    # Values

    def visited(self, stored: StoredKey, call: str) -> Iterator[Slice]:
        """Yield the slices of a key, each locked, in an order that no worker overtakes."""
        return in_turn(stored, self._caller, call)

    def pull(self, stored: StoredKey, outs: Sequence[Tensor]) -> None:
        """Copy the value between two updates to all of `outs`."""
        for each in self.visited(stored, "pull"):
            if not each.index:
                self.has_read(stored, each.num_updates)
            self.copy_slice(stored, each, outs)

    def copy_slice(self, stored: StoredKey, each: Slice, outs: Sequence[Tensor]) -> None:
        """Copy one slice of the value to all of `outs`."""
        value = each.of(stored.flat)
        for out in outs:
            each.of(out).copy_(value)

    def has_read(self, stored: StoredKey, version: int) -> None:
        """Note that this worker has read a version; for modes that bound ages."""

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows of the value between two updates."""
        if not stored.form.num_rows or not stored.form.numel:
            with self.locked(stored):
                self.has_read(stored, stored.slices[0].num_updates)
                return stored.flat.view(stored.shape)[numbers]
        wanted, parts = Rows(numbers, numbers), []
        for batch in batches_in_turn(stored, self._caller, "row_sparse_pull"):
            if not batch[0].index:
                self.has_read(stored, batch[0].num_updates)
            part = wanted.within(*rows_of(batch, stored.form.width)).numbers
            parts.append(table_of(stored, stored.flat).index_select(0, part))
        return torch.cat(parts).view(numbers.numel(), *stored.shape[1:])

    def locked(self, stored: StoredKey) -> AbstractContextManager[None]:
        """Let no worker change the value within the block."""
        return all_locked(stored, self._caller, "reading")

    def state(self, stored: StoredKey) -> list[Named]:
        """Return the state of a key's optimizer between two updates, as copies."""
        with self.locked(stored):
            return whole_state(stored, self.optimizers[stored.key])

    def expected_state(self, stored: StoredKey) -> Expected:
        """Return what the state of a key must have."""
        return expected_state(stored, self.optimizers[stored.key])

    # All workers

    def set_codecs(self, codecs: Codecs) -> None:
        """Raise UserError on all workers if they choose different codecs."""
        self._check_same("set_gradient_compression", [codecs.text])

    def barrier(self) -> None:
        """Wait until all workers have called this; those that are lost only if needed."""
        self.parties.barrier(self.needs_all)

    def put_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Set the state of keys in rank 0 while all workers are here."""
        self.parties.barrier(needs_all=True)
        for key, values in states.items() if self.parties.rank == 0 else ():
            with self.locked(self.keys[key]):
                put_state(self.keys[key], self.optimizers[key], values)
        self.parties.barrier(needs_all=True)

    def note_states_file(self, file: Path) -> None:
        """Do nothing: the states are in memory that no server takes along."""

    def close(self) -> None:
        """Leave the other workers, which continue."""
        self.parties.close()

    def set_number(self, stored: StoredKey, field: int, value: int) -> None:
        """Set a number of this worker's line and wake those that wait for it."""
        at = stored.number(self.parties.rank, field)
        stored.workers[at] = value
        wake(stored.address(at), self.parties.size)


def _room(plan: StatePlan) -> int:
    return max(64, aligned(plan.nbytes))


def _described(form: KeyShape) -> str:
    return json.dumps([form.key, short(form.dtype), list(form.shape)])


def _first_difference(one: list[str], other: list[str]) -> str:
    """Return the first text in which two lists differ."""
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            return ours
    return f"{len(one)} values"
