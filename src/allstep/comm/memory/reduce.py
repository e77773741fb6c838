"""Collectives in shared memory that sum: all_reduce, reduce, reduce_scatter.

The arithmetic is torch's, on views of the pools.

**Small** (up to 64 KB): every rank copies its tensor into a small place, passes a barrier, and sums
all places itself. One barrier.

**Large, two ranks**: both stage a block, pass a barrier, and add the other's block to their own
tensor in place. One barrier per block.

**Large, more ranks**: in blocks that stay in the caches. Rank i owns slice i of each block. One
iteration of the pipeline:

    stage block k          our values of the slices that others own -> our pool
    reduce block k-1       our slice: our values + what the others staged -> our pool
    barrier                "staged k, reduced k-1"
    copy out block k-1     all slices, from their owners' pools -> our tensor

One barrier per block.

**Shared** (`shared_empty`): the tensors of all ranks are in shared memory already, so nothing is
staged. Rank i sums slice i, block by block, and writes the sum into the tensors of all ranks. Two
barriers: before the sums, when all inputs are complete, and after them.

Values are always added in the order of ranks, so the results have the same bits on every rank and
in every run: the bits of one process that adds them in this order.

Where squared norms are wanted (`Squares`), `large` computes them for each block while it is in the
cache: `own` of our values before they are scaled, `mean` of our part of the sums.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.comm.memory.arena import TURNS, Arena, Call
from allstep.comm.op.norms import Squares

Combine = Callable[..., Any]
_SHARED_BLOCK = 256 << 10


def add_up(values: Sequence[Tensor], combine: Combine, out: Tensor) -> None:
    """Sum all values into `out`, which may be the first of them, but no other."""
    if len(values) == 1:
        out.copy_(values[0])
        return
    combine(values[0], values[1], out=out)
    for value in values[2:]:
        combine(out, value, out=out)


def small(
    arena: Arena,
    flat: Tensor,
    places: Sequence[Sequence[Tensor]],
    combine: Combine,
    call: Call,
    keep: bool = True,
) -> None:
    """Reduce a small tensor in place, through `places` (`Arena.small_places`).

    `keep`: whether this rank needs the result.
    """
    arena.turn = turn = 1 - arena.turn
    mine = places[turn]
    mine[arena.rank].copy_(flat)
    arena.barrier(call)
    if not keep:
        return
    if arena.size == 2:
        # Our values are still in the tensor: this reads and writes two streams, not three.
        first, second = (flat, mine[1]) if arena.rank == 0 else (mine[0], flat)
        combine(first, second, out=flat)
    else:
        add_up(mine, combine, flat)


def large(
    arena: Arena,
    flat: Tensor,
    combine: Combine,
    call: Call,
    keep: bool = True,
    scale: float | None = None,
    own: Squares | None = None,
    mean: Squares | None = None,
) -> None:
    """Reduce a large tensor in place, through the pools.

    `keep`: whether this rank needs the result. `scale` is the factor of this rank's values, applied
    block by block; None for no multiplication. `own`, `mean`: where to add squared norms, if
    wanted.
    """
    algorithm = _between_two if arena.size == 2 else _by_slices
    algorithm(arena, flat, combine, call, keep, scale, own, mean)


def _between_two(
    arena: Arena,
    flat: Tensor,
    combine: Combine,
    call: Call,
    keep: bool,
    scale: float | None,
    own: Squares | None,
    mean: Squares | None,
) -> None:
    """Reduce between two ranks: both stage a block, and each adds the other's to its own.

    It moves as many bytes as `_by_slices`, in two steps instead of five.
    """
    rank = arena.rank
    numel = arena.block_numel(flat.dtype, 1, flat.numel(), arena.block)
    blocks = arena.blocks(flat.dtype, numel, 1)
    for k, part in enumerate((flat,) if flat.numel() <= numel else torch.split(flat, numel)):
        values = [_front(place, part) for (place,) in blocks[k % TURNS]]
        _stage(part, values[rank], scale, own)
        arena.barrier(call)
        if keep:
            # Unscaled values are still in `part`, which gets the sum: two streams, not three.
            if scale is None:
                values[rank] = part
            combine(values[0], values[1], out=part)
        if mean is not None and k % arena.size == rank:
            mean.add(part)
    # No rank may stage the next operation while another still reads this one.
    arena.barrier(call)


def _by_slices(
    arena: Arena,
    flat: Tensor,
    combine: Combine,
    call: Call,
    keep: bool,
    scale: float | None,
    own: Squares | None,
    mean: Squares | None,
) -> None:
    """Reduce by slices between three or more ranks: the pipeline of the module docstring."""
    size, rank = arena.size, arena.rank
    numel = arena.block_numel(flat.dtype, size + 1, -(-flat.numel() // size))
    # One block for each owner, and the last for our own sum.
    blocks = arena.blocks(flat.dtype, numel, size + 1)
    parts = torch.split(flat, numel)
    # slices[k][owner]; the last may be short.
    slices = [parts[start : start + size] for start in range(0, len(parts), size)]
    for k in range(len(slices) + 1):
        now, before = blocks[k % TURNS], blocks[(k - 1) % TURNS]
        if k < len(slices):
            for owner, part in enumerate(slices[k]):
                if owner != rank:
                    _stage(part, _front(now[rank][owner], part), scale, own)
        if k > 0 and rank < len(slices[k - 1]):
            mine = slices[k - 1][rank]
            if own is not None:
                own.add(mine)
            if scale is not None:
                mine.mul_(scale)
            _add_up_mine(arena, mine, before, combine)
            if mean is not None:
                mean.add(_front(before[rank][size], mine))
        arena.barrier(call)
        if k > 0 and keep:
            for owner, part in enumerate(slices[k - 1]):
                part.copy_(_front(before[owner][size], part))
    # No rank may stage the next operation while another still copies out of this one.
    arena.barrier(call)


def _stage(part: Tensor, place: Tensor, scale: float | None, own: Squares | None) -> None:
    """Copy `part` into `place`, scaled.

    Scaling here saves a pass over the memory, and leaves the input unchanged if a mismatch follows.
    """
    if own is not None:
        own.add(part)
    if scale is None:
        place.copy_(part)
    else:
        torch.mul(part, scale, out=place)


def _front(place: Tensor, part: Tensor) -> Tensor:
    """Return the range of `place` that `part` fills: all of it except for the last part.

    Without a new view when all of it is filled, which saves 1 us.
    """
    return place if place.numel() == part.numel() else place[: part.numel()]


def _add_up_mine(
    arena: Arena, mine: Tensor, staged: Sequence[Sequence[Tensor]], combine: Combine
) -> None:
    if mine.numel():
        values = [
            mine if rank == arena.rank else _front(staged[rank][arena.rank], mine)
            for rank in range(arena.size)
        ]
        add_up(values, combine, _front(staged[arena.rank][arena.size], mine))


def shared(arena: Arena, blocks: Sequence[Sequence[Tensor]], combine: Combine, call: Call) -> None:
    """Sum our slice and write the sum into the tensors of all ranks. `blocks`: `own_blocks`."""
    arena.barrier(call)
    for parts in blocks:
        add_up(parts, combine, parts[0])
        for other in parts[1:]:
            other.copy_(parts[0])
    arena.barrier(call)


def own_blocks(tensors: Sequence[Tensor], rank: int) -> tuple[tuple[Tensor, ...], ...]:
    """Return the blocks of the slice that a rank owns, as [block][rank].

    `tensors` are those of all ranks, flat, in shared memory.
    """
    each = -(-tensors[0].numel() // (len(tensors) * 64)) * 64
    return tuple(_in_blocks([tensor[rank * each : (rank + 1) * each] for tensor in tensors]))


def add_up_in_blocks(values: Sequence[Tensor], combine: Combine) -> None:
    """Sum all values into the first, in blocks that stay in the caches."""
    for parts in _in_blocks(values):
        add_up(parts, combine, parts[0])


def _in_blocks(values: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    step = _SHARED_BLOCK // values[0].element_size()
    return zip(*(torch.split(value, step) for value in values), strict=True)


def reduce_scatter(
    arena: Arena, output: Tensor, inputs: Sequence[Tensor], combine: Combine, call: Call
) -> None:
    """Reduce `inputs[i]` of all ranks for rank i; ours goes to `output`.

    All tensors are flat. The sizes of `inputs` may differ, but must be the same on every rank.
    `output` may share the memory of our own input: the sum is computed in the pool and copied from
    there.
    """
    size, rank = arena.size, arena.rank
    max_numel = max(each.numel() for each in inputs)
    numel = arena.block_numel(output.dtype, size + 1, max_numel)
    blocks = arena.blocks(output.dtype, numel, size + 1)
    for k in range(-(-max_numel // numel)):
        now = blocks[k % TURNS]
        for owner in arena.others:
            _put(now[rank][owner], inputs[owner][k * numel : (k + 1) * numel])
        arena.barrier(call)
        mine = inputs[rank][k * numel : (k + 1) * numel]
        _add_up_mine(arena, mine, now, combine)
        _take(output[k * numel : (k + 1) * numel], now[rank][size])
    arena.barrier(call)


def _put(place: Tensor, part: Tensor) -> None:
    count = part.numel()
    if count:
        place[:count].copy_(part)


def _take(part: Tensor, place: Tensor) -> None:
    count = part.numel()
    if count:
        part.copy_(place[:count])
