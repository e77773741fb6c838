"""Requests that wait for keys: which ones to check again when a key appears or time passes.

Each request is indexed under one key that it misses. It cannot be answered before that key appears,
so the server checks only the requests that a change concerns, however many are waiting and however
many keys each of them names. A request may also name a key that ends its wait (`unless`): it is
indexed under that key, too.

This module uses no socket and no clock: the caller passes connections and times in.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Generic, TypeVar

Peer = TypeVar("Peer")


@dataclass
class Request:
    """A `get` or `wait`: its keys, whether it returns their values, and its deadline.

    unless: a key that ends the wait when it appears, or None.
    """

    keys: tuple[bytes, ...]
    wants_values: bool
    deadline: float
    unless: bytes | None = None
    # The keys before this position were present.
    position: int = 0

    def missing(self, present: Container[bytes]) -> bytes | None:
        """Return one key that is not present, or None when all are."""
        if self._advance(present) is None:
            # Keys that were present may have been deleted since.
            self.position = 0
        return self._advance(present)

    def _advance(self, present: Container[bytes]) -> bytes | None:
        """Move `position` to the next key that is not present and return it, or None at the end."""
        while self.position < len(self.keys):
            if (key := self.keys[self.position]) not in present:
                return key
            self.position += 1
        return None


class WaitingRequests(Generic[Peer]):
    """The waiting requests, one per peer."""

    def __init__(self) -> None:
        self._requests: dict[Peer, tuple[Request, bytes]] = {}
        # A dict keeps the order of arrival.
        self._by_key: dict[bytes, dict[Peer, None]] = {}
        # No later than the first deadline; infinity without requests. Removing one of several may
        # leave it too early, which costs one idle iteration of the server.
        self.next_deadline = float("inf")

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, peer: Peer, request: Request, missing: bytes) -> None:
        """Add the request of `peer`, indexed under a key that it misses."""
        self._requests[peer] = request, missing
        for key in _indexed(request, missing):
            self._by_key.setdefault(key, {})[peer] = None
        self.next_deadline = min(self.next_deadline, request.deadline)

    def take(self, peer: Peer) -> Request | None:
        """Remove and return the peer's request; None if it has none."""
        request, missing = self._requests.pop(peer, (None, b""))
        if request is not None:
            for key in _indexed(request, missing):
                self._remove(key, peer)
        if not self._requests:
            # A deadline that is left over would never be removed: the server would not sleep again.
            self.next_deadline = float("inf")
        return request

    def _remove(self, key: bytes, peer: Peer) -> None:
        waiting = self._by_key[key]
        del waiting[peer]
        if not waiting:
            del self._by_key[key]

    def waiting_for(self, key: bytes) -> list[Peer]:
        """Return the peers whose request is indexed under `key`."""
        return list(self._by_key.get(key, ()))

    def overdue(self, now: float) -> list[Peer]:
        """Return the peers whose request has reached its deadline."""
        if now < self.next_deadline:
            return []
        dues = {peer: request.deadline for peer, (request, _) in self._requests.items()}
        self.next_deadline = min((due for due in dues.values() if due > now), default=float("inf"))
        return [peer for peer, due in dues.items() if due <= now]


def _indexed(request: Request, missing: bytes) -> set[bytes]:
    """Return the keys whose appearance may answer a request."""
    return {missing} if request.unless is None else {missing, request.unless}
