"""Failover: another server continues the parts of a lost one, from the freshest copy of a worker.

Each worker keeps what it pulled last, with its version. When it notices that a server is lost, it
maps its parts to their successors (`rules.successors`), offers its copies to them, and sends those
that are asked for (`serving.takeovers`). Nothing is agreed between workers: each comes to this in
its own next call, and calls for a part wait on the server until the copy is there.

Updates that the lost server had applied and that no worker has pulled since are lost. The
optimizer's state comes from the states file that was saved or loaded last, else it starts from
zero.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from allstep.errors import AllstepError, PeerLost
from allstep.kvstore.links.all_links import Request
from allstep.kvstore.links.pair import as_bytes, text_bytes
from allstep.kvstore.links.server_loss import ServerLost
from allstep.kvstore.memory.key_memory import StoredKey
from allstep.kvstore.modes.part_forms import part_text
from allstep.kvstore.modes.store_servers import StoreServers
from allstep.kvstore.rules.headers import Header, Kind
from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.offers import NONE, Offer
from allstep.kvstore.rules.placement import PlacedPart
from allstep.kvstore.rules.successors import successor
from allstep.kvstore.updates.states_file import read_states

T = TypeVar("T")
_CALL = "kvstore, failover"


class Copies:
    """What this worker pulled last, by part. Values are in the keys' own memory."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._epochs: dict[int, int] = {}
        self._sent: dict[int, int] = {}

    def note(self, number: int, version: int) -> None:
        """Note the version of a part that has been pulled."""
        self._versions[number] = version

    def note_push(self, number: int) -> None:
        """Count an update that is sent to the server of a part."""
        self._sent[number] = self._sent.get(number, 0) + 1

    def offer(self, number: int) -> Offer:
        """Return what this worker has of a part."""
        version, sent = self._versions.get(number, NONE), self._sent.get(number, 0)
        return Offer(self._epochs.get(number, 0), version, sent)

    def begin_epoch(self, number: int) -> None:
        """Note that another server stores the part, which has no updates there yet."""
        self._epochs[number] = self._epochs.get(number, 0) + 1
        self._versions[number], self._sent[number] = NONE, 0


class Failover:
    """The failover of one worker.

    keys: of the store. moved: called with keys of which parts have moved.
    """

    def __init__(
        self,
        servers: StoreServers,
        keys: Mapping[Key, StoredKey],
        moved: Callable[[Sequence[StoredKey]], None],
    ) -> None:
        self._servers, self._keys, self._moved = servers, keys, moved
        self.copies = Copies()
        self.states_file: Path | None = None
        """The file of optimizer states that was saved or loaded last."""
        self._handled: set[int] = set()

    @property
    def is_possible(self) -> bool:
        """Whether there is another server to continue."""
        return self._servers.num_servers > 1

    def repeat(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, repeated after each lost server."""
        while True:
            self.catch_up()
            try:
                return act()
            except ServerLost:
                continue

    def once(self, act: Callable[[], object]) -> None:
        """Run `act`, which must not be repeated: what it sent to a lost server is lost."""
        self.catch_up()
        try:
            act()
        except ServerLost:
            self.catch_up()

    def catch_up(self) -> None:
        """Take over the parts of servers that have been lost."""
        while lost := self._servers.lost.keys() - self._handled:
            server = min(lost)
            self._take_over(server)
            self._handled.add(server)

    def _take_over(self, server: int) -> None:
        moved: dict[int, list[tuple[StoredKey, PlacedPart]]] = {}
        for key, parts in self._servers.parts.items():
            for index, part in enumerate(parts):
                if part.server == server:
                    next_server = self._successor(part)
                    parts[index] = part._replace(server=next_server)
                    moved.setdefault(next_server, []).append((self._keys[key], parts[index]))
        for next_server, mine in moved.items():
            try:
                self._hand_over(server, next_server, mine)
            except ServerLost:
                # What this successor has, or was to have, moves on when its turn comes.
                continue
        touched = {stored.key: stored for mine in moved.values() for stored, _ in mine}
        self._moved(list(touched.values()))

    def _successor(self, part: PlacedPart) -> int:
        servers = self._servers
        found = successor(
            part.number, servers.homes[part.number], servers.num_servers, servers.lost
        )
        if found is None:
            raise PeerLost(f"{_CALL}: the last server is lost", rank=servers.rank)
        return found

    def _hand_over(
        self, lost: int, server: int, moved: Sequence[tuple[StoredKey, PlacedPart]]
    ) -> None:
        """Offer copies to a successor; send those that it asks for."""
        offers = {part.number: self.copies.offer(part.number) for _, part in moved}
        given = {"lost": self._servers.lost_text(lost), "parts": offers}
        send, missing = self._servers.ask(server, Header(Kind.OFFER), json.dumps(given), _CALL)
        if missing:
            raise PeerLost(
                f"{_CALL}: lost {given['lost']}, and no worker has a copy of its values; start"
                " again from a checkpoint",
                rank=self._servers.rank,
            )
        chosen = [(stored, part) for stored, part in moved if part.number in set(send)]
        requests = [_taken(stored, part) for stored, part in chosen]
        requests += self._states_of(chosen)
        for _, part in moved:
            self.copies.begin_epoch(part.number)
        for _, part in chosen:
            # What this worker sends is what the successor begins with.
            self.copies.note(part.number, 0)
        if requests:
            self._servers.run(requests, _CALL)

    def _states_of(self, chosen: Sequence[tuple[StoredKey, PlacedPart]]) -> list[Request]:
        """Return the requests with the optimizer's state of parts; none without a states file."""
        optimizer = self._servers.chosen
        if self.states_file is None or optimizer is None:
            return []
        try:
            states = read_states(self.states_file, optimizer)
        except (AllstepError, OSError):
            return []
        return [
            request
            for stored, part in chosen
            if stored.key in states
            for request in self._servers.state_requests(
                stored, optimizer, states[stored.key], [part]
            )
        ]


def _taken(stored: StoredKey, part: PlacedPart) -> Request:
    """Return the request with this worker's copy of a part."""
    form = text_bytes(part_text(stored.form, part))
    payload: Tensor = torch.cat([form, as_bytes(stored.flat[slice(*part.span)])])
    return Request(part.server, Header(Kind.TAKE, part.number, a=form.numel()), payload)
