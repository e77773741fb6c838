"""Which server stores which bytes of which key: placement by bytes, with large keys cut.

Placement by the number of keys, as in other systems, puts a model's one large layer on one server,
which then carries most of the traffic while the others are idle. Here every key above a twentieth
of a server's fair share is cut into parts of that size, and the largest part left goes to the
server with the fewest bytes. The fullest server therefore has at most a twentieth more than the
mean. Stores between hosts will use this; on one host there is no server.
"""

from collections.abc import Mapping
from heapq import heapify, heapreplace
from typing import NamedTuple

from allstep.kvstore.rules.key_lists import Key

_SHARES = 20
# Parts start at multiples of this, so that no element is cut.
_ALIGNED = 64
# Below this, a part costs more than the imbalance that it avoids.
MIN_PART = 4096


class Part(NamedTuple):
    """Bytes `start` to `end` of a key."""

    key: Key
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The size of this part."""
        return self.end - self.start


def place(nbytes: Mapping[Key, int], num_servers: int) -> list[list[Part]]:
    """Return the parts that each server stores. nbytes: the size of each key."""
    fair = sum(nbytes.values()) / num_servers
    step = max(MIN_PART, int(fair / _SHARES) // _ALIGNED * _ALIGNED)
    parts = [part for key, size in nbytes.items() for part in _parts(key, size, step)]
    # The sort is stable, so every worker computes the same placement.
    parts.sort(key=lambda part: -part.nbytes)
    servers: list[list[Part]] = [[] for _ in range(num_servers)]
    fill = [(0, number) for number in range(num_servers)]
    heapify(fill)
    for part in parts:
        used, number = fill[0]
        servers[number].append(part)
        heapreplace(fill, (used + part.nbytes, number))
    return servers


def _parts(key: Key, size: int, step: int) -> list[Part]:
    return [Part(key, start, min(size, start + step)) for start in range(0, max(1, size), step)]


def imbalance(servers: list[list[Part]]) -> float:
    """Return the bytes of the fullest server as a multiple of the mean."""
    sizes = [sum(part.nbytes for part in parts) for parts in servers]
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0
