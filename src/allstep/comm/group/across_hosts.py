"""All-reduce over several hosts: in shared memory within a host, by slices between hosts.

```
                 host a: rank 0, rank 1               host b: rank 2, rank 3

reduce-scatter   0: slice 0 of 0+1                    2: slice 0 of 2+3          shared memory
                 1: slice 1 of 0+1                    3: slice 1 of 2+3
across           0 <-------- slice 0 -------------->  2                          the wire: lane 0
                 1 <-------- slice 1 -------------->  3                                    lane 1
all-gather       0, 1: slices 0 and 1                 2, 3: slices 0 and 1       shared memory
```

A small tensor is exchanged whole by the first rank of each host, because a message costs more than
its bytes. Hosts may have different numbers of ranks; see `host_map`. A host with one rank only
exchanges with the other hosts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allstep.comm.memory import copy as copying
from allstep.comm.memory import reduce as summing
from allstep.comm.memory.arena import Arena, Call
from allstep.comm.memory.reduce import Combine
from allstep.comm.network.lane import Lane
from allstep.comm.network.owner_parts import Parts


@dataclass(frozen=True)
class Crossing:
    """How this rank's host reaches the others. `lane` is None on a rank that carries nothing."""

    num_slices: int
    lane: Lane | None

    def get_ready(self) -> None:
        """Prepare the lane; called at the beginning of each operation, on all ranks."""
        if self.lane is not None:
            self.lane.get_ready()

    def carry(self, flat: Tensor, combine: Combine) -> None:
        """Sum `flat`, the slice of this rank, over the hosts, in place."""
        if self.lane is not None and flat.numel():
            self.lane.all_reduce(flat, combine)

    def sum_for_owners(self, parts: Parts, combine: Combine) -> None:
        """Sum parts over the hosts, each for its owner: that of host k gets `parts[k]`."""
        if self.lane is not None:
            self.lane.sum_for_owners(parts, combine)

    def from_owners(self, parts: Parts) -> None:
        """Receive the parts of the other hosts' owners in place, and send them ours."""
        if self.lane is not None:
            self.lane.from_owners(parts)

    def slices(self, flat: Tensor, num_ranks: int) -> list[Tensor]:
        """Return the slice of each rank of the host, the same on every host.

        Ranks without a lane have an empty slice.
        """
        each = -(-flat.numel() // (self.num_slices * 64)) * 64
        parts = list(torch.split(flat, each))
        return parts + [flat[:0]] * (num_ranks - len(parts))


def small(
    arena: Arena,
    crossing: Crossing,
    flat: Tensor,
    places: Sequence[Sequence[Tensor]],
    combine: Combine,
    call: Call,
) -> None:
    """Reduce a small tensor in place, through `places` (`Arena.small_places`).

    The first rank of the host sums, reduces over the hosts, and writes the result for the others.
    """
    if arena.size == 1:
        arena.barrier(call)
        crossing.get_ready()
        crossing.carry(flat, combine)
        return
    arena.turn = turn = 1 - arena.turn
    places[turn][arena.rank].copy_(flat)
    arena.barrier(call)
    crossing.get_ready()
    arena.turn = turn = 1 - turn
    result = places[turn][0]
    if arena.rank == 0:
        summing.add_up(places[1 - turn], combine, flat)
        crossing.carry(flat, combine)
        result.copy_(flat)
    arena.barrier(call)
    if arena.rank != 0:
        flat.copy_(result)


def large(arena: Arena, crossing: Crossing, flat: Tensor, combine: Combine, call: Call) -> None:
    """Reduce a large tensor in place: each rank sums its slice in its own tensor and carries it."""
    slices = crossing.slices(flat, arena.size)
    mine = slices[arena.rank]
    if arena.size == 1:
        arena.barrier(call)
        crossing.get_ready()
        crossing.carry(mine, combine)
        return
    summing.reduce_scatter(arena, mine, slices, combine, call)
    crossing.get_ready()
    crossing.carry(mine, combine)
    copying.all_gather(arena, slices, mine, call)


def shared(
    arena: Arena, crossing: Crossing, tensors: Sequence[Tensor], combine: Combine, call: Call
) -> None:
    """Reduce tensors in shared memory in place. `tensors`: those of the host's ranks, flat.

    Each rank sums its slice, reduces it over the hosts, and writes it to the tensors of all ranks.
    """
    arena.barrier(call)
    slices = [crossing.slices(tensor, arena.size)[arena.rank] for tensor in tensors]
    crossing.get_ready()
    summing.add_up_in_blocks(slices, combine)
    crossing.carry(slices[0], combine)
    for other in slices[1:]:
        other.copy_(slices[0])
    arena.barrier(call)


def barrier(arena: Arena, crossing: Crossing, call: Call) -> None:
    """Wait for all ranks of all hosts."""
    arena.barrier(call)
    crossing.get_ready()
    if arena.rank == 0:
        crossing.carry(torch.zeros(1), torch.add)
    arena.barrier(call)
