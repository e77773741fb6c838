"""Sums gradients for their owners in shared memory: the first half of an allreduce, for owners that
need no second half.

Every rank has gradients of all parameters; the owner of a range needs the sum of all ranks'
gradients of it. In turns of one block::

    stage      copy my gradients of what others own to my pool, one block for each owner
    meet
    add        what the others staged for me, to my own gradient, in its memory

A block holds a part of one large range, or many small ranges next to each other; `Schedule`
computes that once. If squared norms are wanted (`squares`), each range is squared right before it
is scaled and right after it was added, while it is in the cache.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from allstep.comm.memory.arena import TURNS, Arena, Call
from allstep.comm.memory.reduce import add_up
from allstep.comm.op.gradient_norms import Squares
from allstep.comm.timeline import recorder
from allstep.parallel.exchange.owner_ranges import ParameterRange


class BlockRange(NamedTuple):
    """Elements `start` to `end` of parameter `number`, at offset `at` of a block."""

    number: int
    start: int
    end: int
    at: int


class Schedule:
    """Which ranges are moved in which turn, for one dtype. The same on all ranks of a host."""

    def __init__(
        self, arena: Arena, owned: Sequence[Sequence[ParameterRange]], dtype: torch.dtype
    ) -> None:
        largest = max((span.end - span.start for share in owned for span in share), default=0)
        total = max((sum(span.end - span.start for span in share) for share in owned), default=0)
        self.numel = arena.block_numel(dtype, arena.size, max(largest, total))
        self.blocks = arena.blocks(dtype, self.numel, arena.size)
        self.turns = [filled(share, self.numel) for share in owned]
        self.num_turns = max(map(len, self.turns), default=0)

    def ranges(self, owner: int, turn: int) -> Sequence[BlockRange]:
        """Return the ranges that the owner gets in this turn."""
        return (
            self.turns[owner][turn]
            if owner < len(self.turns) and turn < len(self.turns[owner])
            else ()
        )


def filled(ranges: Sequence[ParameterRange], numel: int) -> list[list[BlockRange]]:
    """Return ranges divided and placed next to each other in blocks of at most `numel` elements."""
    blocks: list[list[BlockRange]] = []
    room = 0
    for number, start, end in ranges:
        while start < end:
            if not room:
                blocks.append([])
                room = numel
            count = min(room, end - start)
            blocks[-1].append(BlockRange(number, start, start + count, numel - room))
            start += count
            room -= count
    return blocks


def deliver(
    arena: Arena,
    schedule: Schedule,
    gradients: Mapping[int, Tensor],
    scale: float,
    call: Call,
    own: Squares | None = None,
    mean: Squares | None = None,
) -> None:
    """Add the gradients of all ranks to those of the owners, in place.

    `gradients`: flat, by number, those that some rank has (the same on all ranks). `own`, `mean`:
    measure all of our gradients, and the sums that we own.
    """
    for turn in range(schedule.num_turns):
        blocks = schedule.blocks[turn % TURNS]
        for owner in arena.others:
            _stage(blocks[arena.rank][owner], schedule.ranges(owner, turn), gradients, scale, own)
        arena.barrier(call)
        for span in schedule.ranges(arena.rank, turn):
            if span.number in gradients:
                mine = gradients[span.number][span.start : span.end]
                if own is not None:
                    own.add(mine)
                recorder.during(recorder.ADDING, _add, arena, blocks, span, mine, scale)
                if mean is not None:
                    mean.add(mine)
    # No rank may stage the next operation while another rank still reads this one.
    arena.barrier(call)


def _stage(
    block: Tensor,
    ranges: Sequence[BlockRange],
    gradients: Mapping[int, Tensor],
    scale: float,
    own: Squares | None,
) -> None:
    for number, start, end, at in ranges:
        if number in gradients:
            values = gradients[number][start:end]
            if own is not None:
                own.add(values)
            torch.mul(values, scale, out=block[at : at + end - start])


def _add(
    arena: Arena, blocks: Sequence[Sequence[Tensor]], span: BlockRange, own: Tensor, scale: float
) -> None:
    """Add the ranks' gradients of a range in the order of the ranks.

    The block of this rank for itself is free: with more than two ranks the sum is computed there.
    """
    own.mul_(scale)
    values = [
        own if rank == arena.rank else blocks[rank][arena.rank][span.at : span.at + own.numel()]
        for rank in range(arena.size)
    ]
    if arena.size == 2:
        torch.add(values[0], values[1], out=own)
        return
    place = blocks[arena.rank][arena.rank][: own.numel()]
    add_up(values, torch.add, place)
    own.copy_(place)
