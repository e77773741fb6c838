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
from pathlib import Path

import torch
from torch import Tensor

from allstep.errors import PeerLost, UserError
from allstep.kvstore.links.all_links import Request
from allstep.kvstore.links.server_loss import ServerLost
from allstep.kvstore.memory.key_memory import KeyShape, StoredKey
from allstep.kvstore.memory.slice_locks import ThreadLock
from allstep.kvstore.modes.failover import Copies, Failover
from allstep.kvstore.modes.key_wire import KeyWire
from allstep.kvstore.modes.row_wire import push_rows
from allstep.kvstore.modes.served_values import ServedValues
from allstep.kvstore.rules.headers import Header, Kind
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
        self.failover = Failover(self.servers, self.keys, self.connect)

    # Keys and optimizer

    def _add(self, forms: Sequence[KeyShape], values: Mapping[Key, Tensor]) -> None:
        self._check_servers("init")
        placed = self.servers.place(forms)
        self.servers.from_rank_0("init", lambda: self.servers.send_values(placed, values))
        for form in placed:
            # Untouched, it takes no memory: values are on the servers. A compressed pull needs it.
            memory = memoryview(mmap.mmap(-1, form.place(1, 0).end))
            stored = StoredKey(form, memory, lambda _: ThreadLock(), 1)
            self.keys[form.key] = stored
            if self.rank == 0 and self.failover.is_possible:
                stored.flat.copy_(values[form.key].reshape(-1))
                for part in self.servers.parts[form.key]:
                    self.failover.copies.note(part.number, 0)
            self.connect([stored])
            self.has_pulled(stored)

    def _check_servers(self, call: str) -> None:
        """Raise PeerLost if a server is lost: what all servers must know can no longer be set."""
        lost = self.servers.lost
        if lost:
            raise PeerLost(
                f"{call}: lost {self.servers.lost_text(min(lost))}; pushes and pulls continue, but"
                " new keys and a new optimizer need all servers",
                rank=self.rank,
            )

    def connect(self, added: Sequence[StoredKey]) -> None:
        """Prepare to send these keys: residuals and held values are this worker's own."""
        for stored in added:
            parts = self.servers.parts[stored.key]
            self.wires[stored.key] = KeyWire(stored, parts, self.codecs)

    def set_optimizer(self, chosen: OptimizerClass) -> None:
        """Update with this optimizer on the servers, which keep its state if settings change."""
        self._check_servers("set_optimizer")
        self.servers.check_same("set_optimizer", [chosen.to_json()])
        if chosen.is_whole and not self.servers.is_whole:
            self._cut_no_key()
        self.servers.from_rank_0("set_optimizer", lambda: self.servers.send_optimizer(chosen))
        self.chosen = self.servers.chosen = chosen
        self.servers.warn_if_idle()

    def _cut_no_key(self) -> None:
        """Place all keys again, each whole on one server."""
        values = {key: torch.empty(each.shape, dtype=each.dtype) for key, each in self.keys.items()}
        if self.rank == 0:
            for key, stored in self.keys.items():
                self._receive_exact(stored, range(len(stored.slices)), values[key].view(-1))
        self.servers.collect("set_optimizer, pulled", "")
        self.servers.place_whole()
        self.failover.copies = Copies()
        if values:
            forms = [KeyShape(key, each.shape, each.dtype) for key, each in self.keys.items()]
            self._add(forms, values)

    # Values

    def push(self, stored: StoredKey, gradient: Tensor) -> None:
        """Send a gradient."""
        self._check_optimizer(stored)
        self.failover.once(
            lambda: self.servers.run(
                self._pushes(stored, gradient, Kind.PUSH), f"push of key {stored.key!r}"
            )
        )

    def _pushes(self, stored: StoredKey, gradient: Tensor, kind: Kind) -> list[Request]:
        wire = self.wires[stored.key]
        for part in self.servers.parts[stored.key]:
            self.failover.copies.note_push(part.number)
        return [wire.push(each.index, partial(each.of, gradient), kind) for each in stored.slices]

    def pushpull(self, stored: StoredKey, gradient: Tensor, outs: Sequence[Tensor]) -> None:
        """Send a gradient and receive the value after its update."""
        self._check_optimizer(stored)
        out = outs[0] if outs else torch.empty_like(gradient)
        self.failover.catch_up()
        pushes = self._pushes(stored, gradient, Kind.PUSHPULL)
        requests = [self._pull(stored, index, out, pushed) for index, pushed in enumerate(pushes)]
        try:
            self._receive(stored, requests, outs, f"pushpull of key {stored.key!r}")
        except ServerLost:
            # What was pushed to the lost server is lost with it.
            self.pull(stored, outs or [out])

    def pull(self, stored: StoredKey, outs: Sequence[Tensor]) -> None:
        """Receive the value after this worker's last push."""

        def act() -> None:
            requests = [self._pull(stored, each.index, outs[0]) for each in stored.slices]
            self._receive(stored, requests, outs, f"pull of key {stored.key!r}")

        self.failover.repeat(act)

    def _pull(
        self, stored: StoredKey, index: int, out: Tensor, pushed: Request | None = None
    ) -> Request:
        """Return the request for a part; what arrives is kept in case its server is lost."""
        request = self.wires[stored.key].pull(index, out, pushed)
        if not self.failover.is_possible:
            return request
        part, arrived = self.servers.parts[stored.key][index], request.arrived

        def keep(header: Header, room: Tensor | None) -> None:
            if arrived is not None:
                arrived(header, room)
            # With a codec it holds the value already, as the server does.
            if self.codecs.of(stored.dtype).pull is None:
                stored.flat[slice(*part.span)].copy_(out[slice(*part.span)])
            self.failover.copies.note(part.number, header.a)

        return request._replace(arrived=keep)

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

        def act() -> None:
            parts = self.servers.parts[stored.key]
            for part in parts:
                self.failover.copies.note_push(part.number)
            self.servers.run(push_rows(stored, parts, rows), f"push of key {stored.key!r}")

        self.failover.once(act)

    def rows(self, stored: StoredKey, numbers: Tensor) -> Tensor:
        """Return rows of the value; only these are sent."""
        return self.failover.repeat(lambda: self.pulled_rows(stored, numbers))

    def _receive_exact(self, stored: StoredKey, indexes: Iterable[int], value: Tensor) -> None:
        """Receive parts of the value as the servers have them."""
        chosen = list(indexes)

        def act() -> None:
            requests = [self.wires[stored.key].whole(index, value) for index in chosen]
            self.servers.run(requests, f"pull of key {stored.key!r}")

        self.failover.repeat(act)

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
        return self.failover.repeat(lambda: self.servers.state(stored))

    def note_states_file(self, file: Path) -> None:
        """Begin with these states on a server that continues the parts of a lost one."""
        self.failover.states_file = file

    # All workers

    def barrier(self) -> None:
        """Wait until all workers that are not lost have called this."""
        self.servers.warn_if_idle()
        self.failover.repeat(lambda: self.servers.barrier(needs_all=False))

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
        found = self.failover.repeat(lambda: self.pulled_rows(stored, numbers, visits_all=True))
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
        late = self.failover.repeat(lambda: self.servers.barrier(needs_all=False))
        for key, parts in self.servers.parts.items():
            if late & {part.number for part in parts}:
                self._refused[key] = "other workers updated it before the barrier"
