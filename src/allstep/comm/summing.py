"""Collectives that add up, in shared memory: all_reduce, reduce, reduce_scatter. The arithmetic is torch's, on views of the pools.

**Small** (up to 64 KB): every rank puts its tensor into a small place, meets, and adds up all places by itself. One exchange.

**Large**: in blocks that stay in the caches. Rank i owns slice i of each block. A turn of the pipeline::

    stage block k          my values of the slices that others own -> my pool
    reduce block k-1       my slice: mine + what the others staged -> my pool
    meet                   "staged k, reduced k-1"
    copy out block k-1     all slices, from their owners' pools -> my tensor

One exchange per block.

**Shared** (`shared_empty`): the tensors of all ranks lie in shared memory already, so nothing is staged. Rank i adds up slice i, block by
block, and writes the sum into the tensors of all. Two exchanges: all inputs are there; all sums are there.

Everything is added in the order of ranks, so the results have the same bits on every rank and in every run, the bits that one process
would get that adds them up in this order.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from allstep.comm.arena import TURNS, Arena, Call

Combine = Callable[..., Any]
_SHARED_BLOCK = 256 << 10


def add_up(values: Sequence[Tensor], combine: Combine, out: Tensor) -> None:
    """All values into `out`, which may be the first of them, but no other."""
    if len(values) == 1:
        out.copy_(values[0])
        return
    combine(values[0], values[1], out=out)
    for value in values[2:]:
        combine(out, value, out=out)


def small(
    arena: Arena, flat: Tensor, places: Sequence[Sequence[Tensor]], combine: Combine, call: Call, keep: bool = True
) -> None:
    """places: `Arena.small_places`. keep: whether this rank wants the result."""
    arena.turn = turn = 1 - arena.turn
    mine = places[turn]
    mine[arena.rank].copy_(flat)
    arena.meet(call)
    if keep:
        add_up(mine, combine, flat)


def large(arena: Arena, flat: Tensor, combine: Combine, call: Call, keep: bool = True) -> None:
    """The pipeline of the module's docstring. keep: whether this rank wants the result."""
    size, rank = arena.size, arena.rank
    numel = arena.block_numel(flat.dtype, size + 1, -(-flat.numel() // size))
    blocks = arena.blocks(flat.dtype, numel, size + 1)  # one for each owner, and the last for our own sum
    num_turns = -(-flat.numel() // (numel * size))

    def part(k: int, owner: int) -> Tensor:
        start = (k * size + owner) * numel
        return flat[start : start + numel]

    for k in range(num_turns + 1):
        now, before = blocks[k % TURNS], blocks[(k - 1) % TURNS]
        if k < num_turns:
            for owner in arena.others:
                _put(now[rank][owner], part(k, owner))
        if k > 0:
            _add_up_mine(arena, part(k - 1, rank), before, combine)
        arena.meet(call)
        if k > 0 and keep:
            for owner in range(size):
                _take(part(k - 1, owner), before[owner][size])
    arena.meet(call)  # nobody may stage the next operation while another still copies out of this one


def _add_up_mine(arena: Arena, mine: Tensor, staged: Sequence[Sequence[Tensor]], combine: Combine) -> None:
    count = mine.numel()
    if count:
        values = [mine if rank == arena.rank else staged[rank][arena.rank][:count] for rank in range(arena.size)]
        add_up(values, combine, staged[arena.rank][arena.size][:count])


def shared(arena: Arena, tensors: Sequence[Tensor], combine: Combine, call: Call) -> None:
    """tensors: those of all ranks, flat, in shared memory. Add up our slice and give everybody the sum."""
    arena.meet(call)
    numel = tensors[0].numel()
    each = -(-numel // (arena.size * 64)) * 64
    step = _SHARED_BLOCK // tensors[0].element_size()
    end = min(numel, (arena.rank + 1) * each)
    for start in range(arena.rank * each, end, step):
        values = [tensor[start : min(end, start + step)] for tensor in tensors]
        add_up(values, combine, values[0])
        for other in values[1:]:
            other.copy_(values[0])
    arena.meet(call)


def reduce_scatter(arena: Arena, output: Tensor, inputs: Sequence[Tensor], combine: Combine, call: Call) -> None:
    """inputs[i] is our part of rank i's sum; all flat, sizes may differ between ranks of the group but not between callers.

    `output` may be the memory of our own input: the sum is made in the pool and copied from there.
    """
    size, rank = arena.size, arena.rank
    most = max(each.numel() for each in inputs)
    numel = arena.block_numel(output.dtype, size + 1, most)
    blocks = arena.blocks(output.dtype, numel, size + 1)
    for k in range(-(-most // numel)):
        now = blocks[k % TURNS]
        for owner in arena.others:
            _put(now[rank][owner], inputs[owner][k * numel : (k + 1) * numel])
        arena.meet(call)
        mine = inputs[rank][k * numel : (k + 1) * numel]
        _add_up_mine(arena, mine, now, combine)
        _take(output[k * numel : (k + 1) * numel], now[rank][size])
    arena.meet(call)


def _put(place: Tensor, part: Tensor) -> None:
    count = part.numel()
    if count:
        place[:count].copy_(part)


def _take(part: Tensor, place: Tensor) -> None:
    count = part.numel()
    if count:
        part.copy_(place[:count])
