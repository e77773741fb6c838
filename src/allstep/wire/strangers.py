"""Connections that have not shown the token yet: how many, how long, and which one makes room.

A port scanner, a health check, or a client that stops in the middle of its greeting holds a file
descriptor of the launcher. Three rules keep that harmless:

* A stranger is closed `seconds` after it was accepted, whatever it has sent by then.
* At most `most` strangers are open. When one more connects, the oldest makes room.
* The oldest makes room only once it is older than `GRACE_SECONDS`; until then the server does not
  accept. The kernel's queue holds the newcomers meanwhile, so a burst of genuine ranks is not cut
  off in the middle of its handshakes.

No sockets and no clock here: the server passes both in.
"""

from typing import Generic, TypeVar

SECONDS = 5.0
MOST = 64
# A handshake is one round trip: 0.1 ms on a host, below 50 ms between most sites.
GRACE_SECONDS = 0.05

Peer = TypeVar("Peer")


class Strangers(Generic[Peer]):
    """The strangers, oldest first.

    Args:
        seconds: how long a peer may remain a stranger.
        most: how many there may be at a time.
    """

    def __init__(self, seconds: float = SECONDS, most: int = MOST) -> None:
        self._seconds = seconds
        self._most = most
        self._since: dict[Peer, float] = {}  # a dict keeps the order of arrival

    @property
    def full(self) -> bool:
        """Whether one has to go before another may come."""
        return len(self._since) >= self._most

    @property
    def next_deadline(self) -> float:
        """When the oldest must be closed; infinity without strangers."""
        if not self._since:
            return float("inf")
        return next(iter(self._since.values())) + self._seconds

    def all(self) -> list[Peer]:
        """Return all, oldest first."""
        return list(self._since)

    def add(self, peer: Peer, now: float) -> None:
        """Count a connection that was accepted `now`."""
        self._since[peer] = now

    def discard(self, peer: Peer) -> None:
        """Count it no longer: it has shown the token, or is closed."""
        self._since.pop(peer, None)

    def overdue(self, now: float) -> list[Peer]:
        """Return those whose time is up."""
        return [peer for peer, since in self._since.items() if now >= since + self._seconds]

    def replaceable(self, now: float) -> Peer | None:
        """Return the oldest if it has had time to answer the challenge, else None."""
        peer, since = next(iter(self._since.items()), (None, now))
        return peer if now - since > GRACE_SECONDS else None
