"""Which server stores which bytes of which key: placement by bytes, with large keys cut.

Placement by the number of keys, as in other systems, puts a model's one large layer on one server,
which then carries most of the traffic while the others are idle. Here the largest part left goes to
the server with the fewest bytes, and keys are cut:

=======================================  =====================================================
a key of                                 is cut
=======================================  =====================================================
16 KB or more for each server            into equal parts, as many on each server, of at most
                                         1 MB; fewer parts would cost as many bytes
less, but above 1/20 of a server's fair  into parts of that size, of at least 16 KB
share
less than that                           not
=======================================  =====================================================

Equal parts leave the servers equal, so the fullest one has at most a twentieth more than the mean.

Parts of a matrix begin and end at rows, unless a row is more than 1/40 of a part, so that a push of
rows updates whole rows. A matrix of more than 128 MB has about 128 parts and not more, since such a
push visits all of them.

Keys may come in several calls. `Placement` then counts from what the servers have already, so small
keys that come one by one fill the servers evenly, too.
"""

from collections.abc import Iterable, Mapping
from heapq import heapify, heapreplace
from types import MappingProxyType
from typing import NamedTuple

from allstep.kvstore.rules.key_lists import Key
from allstep.kvstore.rules.slices import SLICE_BYTES, Span

_SHARES = 20
# Parts start at multiples of this, so that no element is cut.
_ALIGNED = 64
_ROWS, _MOST_PARTS = 40, 128
# Below this, a part costs more than the imbalance that it avoids.
MIN_PART = 1 << 14


class Part(NamedTuple):
    """Bytes `start` to `end` of a key."""

    key: Key
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The size of this part."""
        return self.end - self.start


class PlacedPart(NamedTuple):
    """A part as it is sent: its number in the store, its server, and its elements of the key."""

    number: int
    server: int
    span: Span


class Placement:
    """Where all keys of a store are. Every worker computes the same one.

    is_whole: cut no key, for optimizers that need whole layers.
    """

    def __init__(self, num_servers: int, is_whole: bool = False) -> None:
        self.num_servers, self.is_whole = num_servers, is_whole
        self.fill = [0] * num_servers
        self._num_parts = 0

    def add(self, sizes: Mapping[Key, tuple[int, int, int]]) -> dict[Key, list[PlacedPart]]:
        """Place new keys; return the parts of each, in order of their elements.

        sizes: number of elements, bytes of an element, and elements of a row (1: no matrix), by
        key.
        """
        nbytes = {key: numel * itemsize for key, (numel, itemsize, _) in sizes.items()}
        rows = {key: itemsize * width for key, (_, itemsize, width) in sizes.items() if width > 1}
        servers = place(nbytes, self.num_servers, self.fill, self.is_whole, rows)
        found = sorted(
            ((part.start, server, part) for server, parts in enumerate(servers) for part in parts),
            key=lambda each: each[0],
        )
        placed: dict[Key, list[PlacedPart]] = {key: [] for key in sizes}
        for start, server, part in found:
            itemsize = sizes[part.key][1]
            span = (start // itemsize, part.end // itemsize)
            placed[part.key].append(PlacedPart(-1, server, span))
            self.fill[server] += part.nbytes
        return {key: [self._numbered(part) for part in parts] for key, parts in placed.items()}

    def _numbered(self, part: PlacedPart) -> PlacedPart:
        self._num_parts += 1
        return part._replace(number=self._num_parts - 1)


def place(
    nbytes: Mapping[Key, int],
    num_servers: int,
    fill: Iterable[int] = (),
    is_whole: bool = False,
    rows: Mapping[Key, int] = MappingProxyType({}),
) -> list[list[Part]]:
    """Return the parts that each server stores. nbytes: the size of each key.

    fill: bytes that each server has already (default: none). is_whole: cut no key. rows: bytes of
    a row of each key that is a matrix.
    """
    fair = sum(nbytes.values()) / num_servers
    step = max(MIN_PART, int(fair / _SHARES) // _ALIGNED * _ALIGNED)
    parts = [
        part
        for key, size in nbytes.items()
        for part in _parts(
            key,
            size,
            max(1, size) if is_whole else _step(size, num_servers, step, rows.get(key, 0)),
        )
    ]
    # The sort is stable, so every worker computes the same placement.
    parts.sort(key=lambda part: -part.nbytes)
    servers: list[list[Part]] = [[] for _ in range(num_servers)]
    heap = [(used, number) for number, used in enumerate(fill)] or [
        (0, number) for number in range(num_servers)
    ]
    heapify(heap)
    for part in parts:
        used, number = heap[0]
        servers[number].append(part)
        heapreplace(heap, (used + part.nbytes, number))
    return servers


def _step(size: int, num_servers: int, step: int, row: int) -> int:
    """Return the bytes of a part of a key.

    step: of keys that are too small for equal parts. row: bytes of a row of a matrix, else 0.
    """
    largest = max(SLICE_BYTES, size // _MOST_PARTS // _ALIGNED * _ALIGNED if row else 0)
    if size >= num_servers * MIN_PART:
        num_parts = num_servers * -(-size // (num_servers * largest))
        step = -(-size // (num_parts * _ALIGNED)) * _ALIGNED
    step = min(step, largest)
    return -(-step // row) * row if 0 < row * _ROWS <= step else step


def _parts(key: Key, size: int, step: int) -> list[Part]:
    return [Part(key, start, min(size, start + step)) for start in range(0, max(1, size), step)]


def imbalance(servers: list[list[Part]]) -> float:
    """Return the bytes of the fullest server as a multiple of the mean."""
    sizes = [sum(part.nbytes for part in parts) for parts in servers]
    return max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0
