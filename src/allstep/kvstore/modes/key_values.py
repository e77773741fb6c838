"""The protocol behind a store: values by key, which a mode changes in its own way."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from allstep.kvstore.memory.key_memory import StoredKey
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows
from allstep.kvstore.updates.states_file import Expected, Named

Updater = Callable[[Key, Tensor, Tensor], object]
"""`updater(key, gradient, value)` changes the value in place."""


class KeyValues(Protocol):
    """Values by key. Gradients and outputs are flat and contiguous, and fit the key."""

    rank: int
    num_workers: int
    sends: bool
    """Whether pushes are sent to servers: they are encoded then, if a codec is chosen."""
    keys: dict[Key, StoredKey]
    chosen: OptimizerClass | None
    """The optimizer; None before `set_optimizer`."""

    def add(self, values: Mapping[Key, Tensor]) -> None:
        """Store new keys with the values of rank 0. All workers call this together."""

    def set_optimizer(self, chosen: OptimizerClass) -> None:
        """Update with this optimizer from now on. All workers call this together."""

    def set_updater(self, updater: Updater) -> None:
        """Update with a function from now on."""

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Give a gradient, or without an optimizer a value, to the store."""

    def pull(self, stored: StoredKey, outs: Sequence[Tensor]) -> None:
        """Copy the value to all of `outs`."""

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        """Do both, in one pass over the slices where possible."""

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Give some rows of a gradient to the store; the others change neither value nor state."""

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows of the value, all of the same version."""

    def state(self, stored: StoredKey) -> list[Named]:
        """Return the state of a key's optimizer between two updates, as copies."""

    def expected_state(self, stored: StoredKey) -> Expected:
        """Return what the state of a key must have."""

    def put_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Set the state of keys. All workers call this together."""

    def note_states_file(self, file: Path) -> None:
        """Note where the states of the optimizer have been saved, or were loaded from."""

    def set_codecs(self, codecs: Codecs) -> None:
        """Encode what is sent from now on. All workers call this together, with the same codecs."""

    def barrier(self) -> None:
        """Wait until all workers have called this."""

    def close(self) -> None:
        """Leave the other workers."""
