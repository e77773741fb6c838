"""Modes async and stale over several hosts: each worker is a party with links of its own.

A push sends a gradient in slices, each to its server, which applies it; a pull receives the slices
into the caller's tensor. Requests and answers are pipelined over all servers (`links.all_links`).
A push has no answer, so it costs one way; what went wrong on a server is raised by the next pull.

An update of one slice is atomic. A value that is cut into several slices may be a mixture of two
updates, on one host too few to matter for asynchronous training; on one host (`each_push`) it never
is.

Rows of a gradient or of a value cross the links alone (`row_wire`).

**Mode stale** bounds ages slice by slice, on the server (`serving.served_part`). Each push needs a
pull of its key before it: the server knows the version of a gradient from that pull.
"""

import mmap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from allstep.errors import UserError
from allstep.kvstore.links.all_links import Request
from allstep.kvstore.memory.key_memory import KeyShape, StoredKey
from allstep.kvstore.memory.slice_locks import ThreadLock
from allstep.kvstore.modes.key_wire import KeyWire
from allstep.kvstore.modes.row_wire import push_rows
from allstep.kvstore.modes.served_values import ServedValues
from allstep.kvstore.rules.headers import Kind
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.row_updates import Rows, check_rows
from allstep.kvstore.updates.states_file import Named


class ServedPushes(ServedValues):
    """Mode async: each push is an update on the servers; implements `KeyValues`."""

    def __init__(self, kind: StoreKind) -> None:
        super().__init__(kind)
        self.rank, self.num_workers = self.servers.rank, self.servers.size
        self.keys: dict[Key, StoredKey] = {}
        self.chosen: OptimizerClass | None = None

    # Keys and optimizer

    def _add(self, forms: Sequence[KeyShape], values: Mapping[Key, Tensor]) -> None:
        placed = self.servers.place(forms)
        self.servers.from_rank_0("init", lambda: self.servers.send_values(placed, values))
        for form in placed:
            # Untouched, it takes no memory: values are on the servers. A compressed pull needs it.
            memory = memoryview(mmap.mmap(-1, form.place(1, 0).end))
            stored = StoredKey(form, memory, lambda _: ThreadLock(), 1)
            self.keys[form.key] = stored
            self.connect([stored])
            self.has_pulled(stored)

    def connect(self, added: Sequence[StoredKey]) -> None:
        """Prepare to send these keys: residuals and held values are this worker's own."""
        for stored in added:
            parts = self.servers.parts[stored.key]
            self.wires[stored.key] = KeyWire(stored, parts, self.codecs)

    def set_optimizer(self, chosen: OptimizerClass) -> None:
        """Update with this optimizer on the servers, which keep its state if settings change."""
        self.servers.check_same("set_optimizer", [chosen.to_json()])
        if chosen.is_whole and not self.servers.is_whole:
            self._cut_no_key()
        self.servers.from_rank_0("set_optimizer", lambda: self.servers.send_optimizer(chosen))
        self.chosen = chosen
        self.servers.warn_if_idle()

    def _cut_no_key(self) -> None:
        """Place all keys again, each whole on one server."""
        values = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in self.keys.items()}
        if self.rank == 0:
            for key, stored in self.keys.items():
                self._receive_exact(stored, range(len(stored.slices)), values[key].view(-1))
        self.servers.collect("set_optimizer, pulled", "")
        self.servers.place_whole()
        if values:
            forms = [KeyShape(key, each.shape, each.dtype) for key, each in self.keys.items()]
            self._add(forms, values)

    # Values

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Send a gradient."""
        self._check_optimizer(stored)
        requests = self._pushes(stored, gradient, Kind.PUSH)
        self.servers.run(requests, f"push of key {stored.key!r}")

    def _pushes(self, stored: StoredKey, gradient: Tensor, kind: Kind) -> list[Request]:
        wire = self.wires[stored.key]
        return [wire.push(each.index, partial(each.of, gradient), kind) for each in stored.slices]

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        """Send a gradient and receive the value after its update."""
        self._check_optimizer(stored)
        out = outs[0] if outs else torch.empty_like(gradient)
        wire = self.wires[stored.key]
        pushes = self._pushes(stored, gradient, Kind.PUSHPULL)
        requests = [wire.pull(index, out, pushed) for index, pushed in enumerate(pushes)]
        self._receive(stored, requests, outs, f"pushpull of key {stored.key!r}")

    def pull(self, stored: StoredKey, outs: Sequence[Tensor]) -> None:
        """Receive the value after this worker's last push."""
        wire = self.wires[stored.key]
        requests = [wire.pull(each.index, outs[0]) for each in stored.slices]
        self._receive(stored, requests, outs, f"pull of key {stored.key!r}")

    def _receive(
        self, stored: StoredKey, requests: Sequence[Request], outs: Sequence[Tensor], text: str
    ) -> None:
        self.servers.run(requests, text)
        self.wires[stored.key].has_pulled()
        self.has_pulled(stored)
        for other in outs[1:]:
            other.copy_(outs[0])

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Send some rows of a gradient."""
        self._check_optimizer(stored)
        check_rows(stored, self.chosen)
        requests = push_rows(stored, self.servers.parts[stored.key], rows)
        self.servers.run(requests, f"push of key {stored.key!r}")

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows of the value; only these are sent."""
        return self.pulled_rows(stored, numbers)

    def _receive_exact(self, stored: StoredKey, indexes: Iterable[int], value: Tensor) -> None:
        """Receive parts of the value as the servers have them."""
        wire = self.wires[stored.key]
        requests = [wire.whole(index, value) for index in indexes]
        self.servers.run(requests, f"pull of key {stored.key!r}")

    def has_pulled(self, stored: StoredKey) -> None:
        """Note that this worker has the value of a key; for modes that bound ages."""

    def _check_optimizer(self, stored: StoredKey) -> None:
        if self.chosen is None:
            raise UserError(
                f"push of key {stored.key!r}: a {self.kind.name!r} store updates at each push and"
                " has no optimizer yet; call set_optimizer first"
            )

    # State

    def state(self, stored: StoredKey) -> list[Named]:
        """Return the state of a key's optimizer, from its servers."""
        return self.servers.state(stored)

    # All workers

    def barrier(self) -> None:
        """Wait until all workers that are not lost have called this."""
        self.servers.warn_if_idle()
        self.servers.barrier(needs_all=False)

    def close(self) -> None:
        """Leave the other workers, which continue."""
        self.servers.close()


class ServedAges(ServedPushes):
    """Mode stale: as async, but no gradient older than `kind.rounds` rounds is applied."""

    def __init__(self, kind: StoreKind) -> None:
        super().__init__(kind)
        # Why the next push of a key is refused; "" if it is not.
        self._refused: dict[Key, str] = {}

    def has_pulled(self, stored: StoredKey) -> None:
        """Allow one push: the servers have noted the version of its gradient."""
        self._refused[stored.key] = ""

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Send a gradient; the servers apply it when the bound allows it."""
        self._check_age(stored)
        super().push(stored, gradient)
        self._refused[stored.key] = "it was pushed and not pulled since"

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        """Send a gradient and receive the value after its update."""
        self._check_age(stored)
        super().pushpull(stored, gradient, outs)

    def push_rows(self, stored: StoredKey, rows: Rows) -> None:
        """Send some rows of a gradient; the servers apply them when the bound allows it."""
        self._check_age(stored)
        super().push_rows(stored, rows)
        self._refused[stored.key] = "it was pushed and not pulled since"

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows of the value; all parts note that they were read."""
        found = self.pulled_rows(stored, numbers, visits_all=True)
        self.has_pulled(stored)
        return found

    def _check_age(self, stored: StoredKey) -> None:
        if why := self._refused[stored.key]:
            raise UserError(
                f"push of key {stored.key!r}: {why}, so the age of the gradient has no bound in a"
                f" {self.kind.name!r} store over several hosts; pull the key before each push, or"
                " use pushpull"
            )

    def barrier(self) -> None:
        """Wait until all living workers have called this. No push waits for them."""
        late = self.servers.barrier(needs_all=False)
        for key, parts in self.servers.parts.items():
            if late & {part.number for part in parts}:
                self._refused[key] = "other workers updated it before the barrier"
