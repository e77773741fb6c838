"""Which ranks of a group share a host, and which of them exchange data with other hosts.

```
            host a              host b
            rank 0  rank 1      rank 2  rank 3  rank 4
local rank  0       1           0       1       2
lane        0 ------------------0                       carries slice 0 of a tensor across
                    1 -----------------1                carries slice 1
                                               (none)   the smallest host has two ranks: two lanes
```

A tensor is cut into as many slices as there are lanes. Every rank with a lane reduces its slice
over the hosts, all at the same time: the bytes on the wire are those of one rank per host.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The hosts of a group, seen from one rank."""

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    """The ranks on each host."""

    @classmethod
    def of(cls, rank: int, nodes: Sequence[str]) -> "Layout":
        """Return the layout of ranks whose hosts are `nodes`, numbered in order of appearance."""
        ranks_on: dict[str, list[int]] = {}
        for other, node in enumerate(nodes):
            ranks_on.setdefault(node, []).append(other)
        return cls(rank, tuple(tuple(ranks) for ranks in ranks_on.values()))

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return sum(map(len, self.hosts))

    @property
    def host(self) -> int:
        """The number of our host."""
        return next(number for number, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of our host, this rank included."""
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        return self.neighbours.index(self.rank)

    @property
    def num_lanes(self) -> int:
        """The number of ranks of the smallest host; 0 if there is only one host."""
        return min(map(len, self.hosts)) if len(self.hosts) > 1 else 0

    @property
    def lane(self) -> tuple[int, ...]:
        """The ranks with our local rank, by host; empty if our local rank has no lane."""
        local_rank = self.local_rank
        return (
            tuple(ranks[local_rank] for ranks in self.hosts) if local_rank < self.num_lanes else ()
        )
