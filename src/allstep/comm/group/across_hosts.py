"""All-reduce over several hosts: within a host in shared memory, between hosts by slice.

```
                 host a: rank 0, rank 1               host b: rank 2, rank 3

reduce-scatter   0: slice 0 of 0+1                    2: slice 0 of 2+3          shared memory
                 1: slice 1 of 0+1                    3: slice 1 of 2+3
across           0 <-------- slice 0 -------------->  2                          the wire: lane 0
                 1 <-------- slice 1 -------------->  3                                    lane 1
all-gather       0, 1: slices 0 and 1                 2, 3: slices 0 and 1       shared memory
```

Small tensors cross in one piece, carried by the first rank of each host: for them a message costs
more than its bytes. Hosts may have different numbers of ranks; see `host_map`. A host with one rank
has nothing to do but to cross.
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


@dataclass(frozen=True)
class Crossing:
    """How this rank's host reaches the others. lane: None on a rank that carries nothing."""

    num_slices: int
    lane: Lane | None

    def get_ready(self) -> None:
        """At the begin of each operation, on all ranks."""
        if self.lane is not None:
            self.lane.get_ready()

    def carry(self, flat: Tensor, combine: Combine) -> None:
        """Sum over the hosts, in place, what this rank carries."""
        if self.lane is not None and flat.numel():
            self.lane.all_reduce(flat, combine)

    def slices(self, flat: Tensor, num_ranks: int) -> list[Tensor]:
        """What each of the host's ranks carries: the same on every host, empty for ranks without a
        lane."""
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
    """places:

    `Arena.small_places`. The first rank of the host adds up, crosses, and leaves the result for the
    others.
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
    """Each rank's slice of the sum is made where it lies in the rank's own tensor, and crosses from
    there."""
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
    """tensors: those of the host's ranks, flat, in shared memory.

    Add up our slice, cross with it, give everybody the sum.
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
    """All ranks of all hosts are here."""
    arena.barrier(call)
    crossing.get_ready()
    if arena.rank == 0:
        crossing.carry(torch.zeros(1), torch.add)
    arena.barrier(call)
