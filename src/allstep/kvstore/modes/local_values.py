"""Mode local: the values of one process, for scripts that run without other workers.

A push replaces the value by the sum of what was pushed, or updates it with the optimizer or the
script's own function. Slices and optimizers are those of the shared modes, in private memory.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor

from allstep.kvstore.memory.bounded_wait import BoundedWait
from allstep.kvstore.memory.key_memory import (
    Caller,
    KeyShape,
    Slice,
    StoredKey,
    all_locked,
    in_turn,
)
from allstep.kvstore.memory.row_batches import batches_in_turn
from allstep.kvstore.memory.slice_locks import ThreadLock
from allstep.kvstore.modes.key_values import Updater
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.updates.key_optimizer import (
    KeyOptimizer,
    StatePlan,
    may_keep_state,
    plain_sum,
)
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows, apply_rows, as_sparse, check_rows
from allstep.kvstore.updates.states_file import (
    Expected,
    Named,
    expected_state,
    put_state,
    whole_state,
)


class LocalValues:
    """Values of this process alone; implements `KeyValues`."""

    rank, num_workers, sends = 0, 1, False

    def __init__(self) -> None:
        self.keys: dict[Key, StoredKey] = {}
        self.optimizers: dict[Key, KeyOptimizer] = {}
        self.chosen: OptimizerClass | None = None
        self._updater: Updater | None = None
        self._caller = Caller(0, _no_limits)

    def add(self, values: Mapping[Key, Tensor]) -> None:
        for key, value in values.items():
            form = KeyShape(key, tuple(value.shape), value.dtype)
            memory = memoryview(bytearray(form.place(1, 0).end))
            stored = StoredKey(form, memory, lambda _: ThreadLock(), 1)
            stored.flat.copy_(value.reshape(-1))
            self.keys[key] = stored
            if self.chosen is not None:
                self._attach(stored, self.chosen)

    def set_optimizer(self, chosen: OptimizerClass) -> None:
        plans = {key: StatePlan(chosen, stored.form) for key, stored in self.keys.items()}
        if may_keep_state(self.optimizers, self.chosen, chosen, plans):
            for optimizer in self.optimizers.values():
                optimizer.use_settings(chosen)
        else:
            self.optimizers = {}
            for stored in self.keys.values():
                self._attach(stored, chosen)
        self.chosen, self._updater = chosen, None

    def _attach(self, stored: StoredKey, chosen: OptimizerClass) -> None:
        plan = StatePlan(chosen, stored.form)
        for each in stored.slices:
            each.has_state = False
        made = KeyOptimizer(stored, chosen, plan, memoryview(bytearray(max(1, plan.nbytes))))
        made.copy_to_master()
        self.optimizers[stored.key] = made

    def set_updater(self, updater: Updater) -> None:
        self.optimizers, self.chosen, self._updater = {}, None, updater

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        if self._updater is not None:
            value = stored.flat.view(stored.shape)
            self._updater(stored.key, gradient.view(stored.shape), value)
            return
        for each in in_turn(stored, self._caller, "push"):
            self._apply(stored, each, gradient[each.start : each.end])

    def _apply(self, stored: StoredKey, each: Slice, gradient: Tensor) -> None:
        optimizer = self.optimizers.get(stored.key)
        if optimizer is None:
            plain_sum(stored, each, gradient)
        else:
            optimizer.apply(each, gradient)

    def pull(self, stored: StoredKey, outs: Sequence[Tensor]) -> None:
        for out in outs:
            out.copy_(stored.flat)

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        self.push(stored, gradient)
        self.pull(stored, outs)

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        if self._updater is not None:
            value = stored.flat.view(stored.shape)
            self._updater(stored.key, as_sparse(stored, rows), value)
            return
        check_rows(stored, self.chosen)
        for batch in batches_in_turn(stored, self._caller, "push"):
            apply_rows(stored, self.optimizers.get(stored.key), batch, rows)

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        return stored.flat.view(stored.shape)[numbers]

    def locked(self, stored: StoredKey) -> AbstractContextManager[None]:
        return all_locked(stored, self._caller, "reading the state")

    def state(self, stored: StoredKey) -> list[Named]:
        with self.locked(stored):
            return whole_state(stored, self.optimizers[stored.key])

    def expected_state(self, stored: StoredKey) -> Expected:
        return expected_state(stored, self.optimizers[stored.key])

    def put_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        for key, values in states.items():
            with self.locked(self.keys[key]):
                put_state(self.keys[key], self.optimizers[key], values)

    def set_codecs(self, codecs: Codecs) -> None: ...

    def barrier(self) -> None: ...

    def note_states_file(self, file: Path) -> None:
        """Do nothing: the states are in memory that no server takes along."""

    def close(self) -> None: ...


def _no_limits(text: str) -> BoundedWait | None:
    """Wait for another thread of this process without limits: it cannot be lost alone."""
    return None
