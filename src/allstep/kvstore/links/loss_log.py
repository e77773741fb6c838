"""The servers that count as lost, in one order for all workers: a log in the store of the ranks.

When a link between two hosts is cut, the workers of each host find the server of the other one
lost. Both would continue, each with a copy of the values. So a worker that finds a server lost
claims the next entry of the log; if another worker was first, it takes over what that one has
written, and continues only if there is a server left that no entry names. A worker that cannot
reach the store of the ranks does not continue either: it may be the one that is cut off.

    claim/1   who was first, by a counter      lost/1   "1"      the server
"""

from torch._C._distributed_c10d import Store

from allstep.comm.health.helper_thread import call_in_thread
from allstep.errors import PeerLost

_LOOKS_PER_SECOND = 20


class LossLog:
    """The log of one store, as one worker reads it. seconds: limit of an access."""

    def __init__(self, store: Store, rank: int, num_servers: int, seconds: float) -> None:
        self._store, self._rank, self._seconds = store, rank, seconds
        self._all = set(range(num_servers))
        self._entries: list[int] = []

    def enter(self, server: int) -> list[int]:
        """Enter a lost server unless an entry names it; return the entries that are new here."""
        left = int(self._seconds * _LOOKS_PER_SECOND) + 1

        def check() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise TimeoutError

        try:
            found: list[int] = call_in_thread(lambda: self._enter(server), check)
        except (RuntimeError, OSError) as error:
            raise PeerLost(
                f"kvstore, failover: server {server} is lost, and the store of the ranks cannot be"
                " reached: this host may be the one that is cut off; start again from a checkpoint",
                rank=self._rank,
            ) from error
        return found

    def _enter(self, server: int) -> list[int]:
        before = len(self._entries)
        # Without any server left this worker ends, and enters nothing for those that continue.
        while server not in self._entries and {*self._entries, server} != self._all:
            number = len(self._entries) + 1
            if self._store.add(f"claim/{number}", 1) == 1:
                self._store.set(f"lost/{number}", str(server))
            # Waits until the worker that was first has written it.
            self._entries.append(int(self._store.get(f"lost/{number}")))
        return self._entries[before:]
