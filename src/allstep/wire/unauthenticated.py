"""Limits for connections that have not proved the token: how many, how long, which one is closed.

A port scanner, a health check, or a client that stops in the middle of its handshake holds a file
descriptor of the launcher. Three rules keep that harmless:

* An unauthenticated connection is closed `seconds` after it was accepted, whatever it has sent.
* At most `max_open` of them are open. When one more connects, the oldest is closed.
* The oldest is closed for another only if it is older than `GRACE_SECONDS`; until then the server
  does not accept. The kernel's queue holds new connections meanwhile, so a burst of genuine ranks
  is not cut off in the middle of its handshakes.

This module uses no socket and no clock: the caller passes connections and times in.
"""

from typing import Generic, TypeVar

AUTH_SECONDS = 5.0
MAX_OPEN = 64
# A handshake is one round trip: 0.1 ms on a host, below 50 ms between most sites.
GRACE_SECONDS = 0.05

Peer = TypeVar("Peer")


class Unauthenticated(Generic[Peer]):
    """The unauthenticated connections, oldest first.

    Args:
        seconds: time after which a connection must be closed.
        max_open: upper limit of connections.
    """

    def __init__(self, seconds: float = AUTH_SECONDS, max_open: int = MAX_OPEN) -> None:
        self._seconds = seconds
        self._max_open = max_open
        # The time of acceptance by peer. A dict keeps the order of arrival.
        self._since: dict[Peer, float] = {}

    @property
    def full(self) -> bool:
        """Return whether the number of connections has reached `max_open`."""
        return len(self._since) >= self._max_open

    @property
    def next_deadline(self) -> float:
        """Return the time at which the oldest must be closed; infinity if there is none."""
        if not self._since:
            return float("inf")
        return next(iter(self._since.values())) + self._seconds

    def all(self) -> list[Peer]:
        """Return all connections, oldest first."""
        return list(self._since)

    def add(self, peer: Peer, now: float) -> None:
        """Add a connection that was accepted at time `now`."""
        self._since[peer] = now

    def discard(self, peer: Peer) -> None:
        """Remove a connection that has proved the token or is closed; a no-op if it is absent."""
        self._since.pop(peer, None)

    def overdue(self, now: float) -> list[Peer]:
        """Return the connections that must be closed at time `now`."""
        return [peer for peer, since in self._since.items() if now >= since + self._seconds]

    def replaceable(self, now: float) -> Peer | None:
        """Return the oldest connection if it is older than `GRACE_SECONDS`, else None."""
        peer, since = next(iter(self._since.items()), (None, now))
        return peer if now - since > GRACE_SECONDS else None
