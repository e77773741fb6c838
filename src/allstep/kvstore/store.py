"""`KVStore`: MXNet's key-value store on torch tensors, and `create`, which makes one.

A call here checks its arguments and visits the keys one by one; what a push or a pull does is in
`modes`. Calls return when their work is done, so `priority` changes nothing.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from allstep.comm.group.init import at_shutdown, session
from allstep.errors import UserError, did_you_mean
from allstep.kvstore import sparse_rows, tensor_checks
from allstep.kvstore.memory.key_memory import StoredKey
from allstep.kvstore.modes.each_push import BoundedAge, EachPush
from allstep.kvstore.modes.each_round import EachRound
from allstep.kvstore.modes.key_values import KeyValues, Updater
from allstep.kvstore.modes.local_values import LocalValues
from allstep.kvstore.modes.served_pushes import ServedAges, ServedPushes
from allstep.kvstore.modes.served_rounds import ServedRounds
from allstep.kvstore.modes.store_servers import needs_servers
from allstep.kvstore.push_compression import PushCompression
from allstep.kvstore.rules.key_lists import Key, check_kinds, check_new, values_by_key
from allstep.kvstore.rules.store_kinds import StoreKind, store_kind
from allstep.kvstore.updates.optimizer_class import OptimizerClass, optimizer_class
from allstep.kvstore.updates.row_updates import Rows, as_sparse
from allstep.kvstore.updates.states_file import check_states, read_states, write_states

_MODES: dict[str, Callable[[StoreKind], KeyValues]] = {
    "local": lambda kind: LocalValues(),
    "sync": EachRound,
    "async": EachPush,
    "stale": BoundedAge,
}
_SERVED: dict[str, Callable[[StoreKind], KeyValues]] = {
    "sync": ServedRounds,
    "async": ServedPushes,
    "stale": ServedAges,
}
_CAPABILITIES = ("optimizer",)


def create(name: str = "local") -> "KVStore":
    """Return a new store. All workers create the same ones, in the same order.

    name: local, device, dist_sync, dist_async, dist_stale:S or another of MXNet's names; see
    `rules.store_kinds`.
    """
    kind = store_kind(name)
    if kind.mode not in _SERVED:
        return KVStore(kind, _MODES[kind.mode](kind))
    joined = session().join()
    try:
        made = (_SERVED if needs_servers(joined) else _MODES)[kind.mode](kind)
    finally:
        session().part()
    return KVStore(kind, made)


class KVStore:
    """Values by key that workers initialize, push and pull; `create` makes one.

    kind: what the store does. values: where its values are.

    Keys are all int or all str. Every method takes one key or a list of keys with a list of values.
    A store is for one thread at a time. As a context manager, it closes at the end of the block.
    """

    def __init__(self, kind: StoreKind, values: KeyValues) -> None:
        self._kind, self._values = kind, values
        self._compression = PushCompression(sends=values.sends)
        # Also at the end of the process, so that the other workers know at once.
        self._end = weakref.finalize(self, values.close)
        at_shutdown(self.close)

    # Position

    @property
    def type(self) -> str:
        """The name with which the store was created, in lower case."""
        return self._kind.name

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._values.rank

    @property
    def num_workers(self) -> int:
        """The number of workers of the store."""
        return self._values.num_workers

    def is_capable(self, capability: str) -> bool:
        """Return whether the store can update values itself; the one capability is "optimizer"."""
        if str(capability).lower() not in _CAPABILITIES:
            raise UserError(
                f"is_capable({capability!r}): unknown; {did_you_mean(capability, _CAPABILITIES)}"
            )
        return self._kind.has_optimizer

    # Values

    def init(self, key: Any, value: Any) -> None:
        """Store new keys; all workers call it together, and the values of rank 0 count."""
        self._check_open()
        check_new("init", key, self._values.keys)
        given = values_by_key("init", key, value)
        check_kinds("init", given, self._values.keys)
        self._values.add(
            {key: tensor_checks.new_value("init", key, values) for key, values in given.items()}
        )

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Give gradients to the store, or without an optimizer values that replace its own.

        Several values of one key are summed first. A sparse gradient, such as that of
        `nn.Embedding(sparse=True)`, updates its rows only. priority: accepted for MXNet's sake.
        """
        for stored, values in self._known("push", key, value):
            if sparse_rows.are_sparse(values):
                self._compression.check_rows(stored)
                self._values.push_rows(stored, sparse_rows.pushed(stored, values))
                continue
            gradient = tensor_checks.pushed("push", stored, values)
            self._values.push(stored, self._compression.applied(stored, gradient))

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Copy the values after this worker's last push to `out`, which may be several tensors.

        ignore_sparse: leave sparse tensors in `out` unchanged; else they are an error.
        """
        _check_given("pull", out)
        for stored, outs in self._known("pull", key, out):
            found = tensor_checks.outputs("pull", stored, outs, ignore_sparse)
            if found:
                self._fill(found, partial(self._values.pull, stored))

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push and pull in one pass. Without `out`, the result replaces `value`."""
        given = self._known("pushpull", key, value)
        outs_of = values_by_key("pushpull", key, value if out is None else out)
        for stored, values in given:
            gradient = tensor_checks.pushed("pushpull", stored, values)
            gradient = self._compression.applied(stored, gradient)
            outs = tensor_checks.outputs("pushpull", stored, outs_of[stored.key])
            self._fill(outs, partial(self._values.pushpull, stored, gradient))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Store new keys with rank 0's values and copy these to `out`: init and pull."""
        _check_given("broadcast", out)
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Copy some rows of each value to sparse tensors.

        out: sparse COO tensors of the shape of the key. row_ids: the numbers of the rows; one
        tensor for all, or a list with one for each tensor of `out`.
        """
        _check_given("row_sparse_pull", out)
        if row_ids is None:
            raise UserError("row_sparse_pull: row_ids is missing; pass the numbers of the rows")
        for stored, outs in self._known("row_sparse_pull", key, out):
            for place, each in enumerate(outs):
                ids = sparse_rows.ids_for(row_ids, place, len(outs))
                numbers = sparse_rows.row_numbers(stored, ids)
                target = sparse_rows.output(stored, each)
                rows = self._values.rows(stored, numbers)
                target.copy_(as_sparse(stored, Rows(numbers, rows)))

    def _known(self, call: str, key: Any, values: Any) -> list[tuple[StoredKey, list[Any]]]:
        """Return the keys of a call, which must be in the store, with their values."""
        self._check_open()
        keys = self._values.keys
        given: Mapping[Key, list[Any]] = values_by_key(call, key, values)
        check_kinds(call, given, keys)
        return [(tensor_checks.known(call, each, keys), found) for each, found in given.items()]

    @staticmethod
    def _fill(outs: list[Tensor], fill: Callable[[list[Tensor]], None]) -> None:
        """Call `fill` with flat tensors, and copy to those that are not flat in memory."""
        flats = [
            tensor_checks.flattened(out) if out.is_contiguous() else out.new_empty(out.numel())
            for out in outs
        ]
        fill(flats)
        for out, flat in zip(outs, flats, strict=True):
            if not out.is_contiguous():
                out.copy_(flat.view(out.shape))

    # Updates

    def set_optimizer(self, optimizer: Any, **settings: Any) -> None:
        """Let the store update its values; all workers call it together, with the same settings.

        optimizer: a class of torch.optim, or an optimizer from which class and settings are taken.
        settings: those of the class, and `multi_precision=True` for float32 master weights of
        half-precision keys. Another call with the same class keeps the state and changes settings,
        such as the learning rate.
        """
        self._check_open()
        if not self._kind.has_optimizer:
            raise UserError(
                f"set_optimizer: a {self.type!r} store only sums; create 'dist_sync' for a store"
                " that updates"
            )
        self._values.set_optimizer(optimizer_class(optimizer, settings))

    def set_updater(self, updater: Updater) -> None:
        """Update with `updater(key, gradient, value)`, which changes the value; local stores only.

        Its `gradient` is the sum of what was pushed.
        """
        self._check_open()
        if not callable(updater):
            raise UserError(f"set_updater: {updater!r} is no function of (key, gradient, value)")
        self._values.set_updater(updater)

    _set_updater = set_updater

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress from now on; all workers call it together, before the first push.

        compression_params: such as {"type": "2bit", "threshold": 0.5} for pushes; with the setting
        "pull", such as "2bit" or "bf16", pulls between hosts too. See `push_compression`.
        """
        self._check_open()
        self._values.set_codecs(self._compression.choose(self._kind, compression_params))

    # All workers

    def barrier(self) -> None:
        """Wait until all workers have called this.

        With dist_async and dist_stale, workers that are lost are not waited for.
        """
        self._check_open()
        self._values.barrier()

    _barrier = barrier

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state to the file `fname`; one worker is enough.

        dump_optimizer: accepted for MXNet's sake; class and settings are always in the file.
        """
        chosen = self._optimizer("save_optimizer_states")
        states = {key: self._values.state(stored) for key, stored in self._values.keys.items()}
        write_states(Path(fname), chosen, states)
        self._values.note_states_file(Path(fname).absolute())

    def load_optimizer_states(self, fname: str | Path) -> None:
        """Read the optimizer's state from the file `fname`; all workers call it together."""
        path, values = Path(fname), self._values
        states = read_states(path, self._optimizer("load_optimizer_states"))
        expected = {key: values.expected_state(stored) for key, stored in values.keys.items()}
        check_states(path, expected, states)
        values.put_states(states)
        values.note_states_file(path.absolute())

    def _optimizer(self, call: str) -> OptimizerClass:
        self._check_open()
        if self._values.chosen is None:
            raise UserError(f"{call}: the store has no optimizer; call set_optimizer first")
        return self._values.chosen

    # The end

    def close(self) -> None:
        """Leave the store; the other workers continue. A second call does nothing."""
        self._end()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise UserError("this kvstore is closed; create another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        keys = len(self._values.keys)
        return f"KVStore({self.type!r}, rank {self.rank} of {self.num_workers}, {keys} keys)"


def _check_given(call: str, out: Any) -> None:
    if out is None:
        raise UserError(f"{call}: out is missing; pass the tensors that receive the values")
