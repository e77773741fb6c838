"""What all modes with servers do alike: they ask the servers (`store_servers`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allstep.kvstore.memory.key_memory import KeyShape, StoredKey
from allstep.kvstore.modes.key_values import Updater
from allstep.kvstore.modes.key_wire import KeyWire
from allstep.kvstore.modes.part_forms import described
from allstep.kvstore.modes.row_wire import pull_rows
from allstep.kvstore.modes.store_servers import StoreServers, refuse_updater
from allstep.kvstore.rules.codecs import Codecs
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.store_kinds import StoreKind
from allstep.kvstore.updates.optimizer_class import OptimizerClass
from allstep.kvstore.updates.states_file import Expected


class ServedValues:
    """The first base of a mode whose values are on servers."""

    kind: StoreKind
    servers: StoreServers
    keys: dict[Key, StoredKey]
    chosen: OptimizerClass | None
    sends = True

    def __init__(self, kind: StoreKind) -> None:
        self.kind = kind
        self.codecs = Codecs()
        self.wires: dict[Key, KeyWire] = {}
        self.servers = StoreServers(kind)

    def add(self, values: Mapping[Key, Tensor]) -> None:
        """Store new keys with the values of rank 0, on the servers and in each host's memory."""
        forms = [KeyShape(key, tuple(each.shape), each.dtype) for key, each in values.items()]
        self.servers.check_same("init", [described(form) for form in forms])
        self._add(forms, values)

    def _add(self, forms: Sequence[KeyShape], values: Mapping[Key, Tensor]) -> None:
        raise NotImplementedError

    def set_updater(self, updater: Updater) -> None:
        """Raise UserError."""
        refuse_updater(self.kind, updater)

    def expected_state(self, stored: StoredKey) -> Expected:
        """Return what the state of a key must have."""
        assert self.chosen is not None
        return self.servers.expected_state(stored, self.chosen)

    def put_states(self, states: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Set the state of keys while all workers are here."""
        chosen = self.chosen
        assert chosen is not None

        def put() -> None:
            for key, values in states.items():
                self.servers.put_state(self.keys[key], chosen, values)

        self.servers.barrier(needs_all=True)
        self.servers.from_rank_0("load_optimizer_states", put)

    def set_codecs(self, codecs: Codecs) -> None:
        """Encode what is sent from now on, on all workers and servers."""
        self.servers.set_codecs(codecs)
        self.codecs = codecs
        self.connect(list(self.keys.values()))

    def note_states_file(self, file: Path) -> None:
        """Do nothing; only a mode that continues without a server needs it."""

    def pulled_rows(self, stored: StoredKey, numbers: Tensor, **how: Any) -> Tensor:
        """Return rows from the servers. how: as `row_wire.pull_rows`."""
        out = torch.empty(numbers.numel() * stored.form.width, dtype=stored.dtype)
        parts = self.servers.parts[stored.key]
        requests = pull_rows(stored, parts, numbers, out, **how) if out.numel() else []
        self.servers.run(requests, f"row_sparse_pull of key {stored.key!r}")
        return out.view(numbers.numel(), *stored.shape[1:])

    def connect(self, added: Sequence[StoredKey]) -> None:
        """Prepare to send these keys."""
        raise NotImplementedError
