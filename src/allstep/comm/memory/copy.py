"""Collectives in shared memory that only copy: broadcast, all_gather, all_to_all.

All of them work in blocks with double buffering: a rank writes block k into one half of its pool
while others may still read block k-1 from the other half. A barrier separates the blocks.
"""

from collections.abc import Sequence

from torch import Tensor

from allstep.comm.memory.arena import TURNS, Arena, Call

_LARGE_BLOCK = 1 << 20


def broadcast(arena: Arena, flat: Tensor, root: int, call: Call) -> None:
    """Copy the root's tensor to every rank."""
    numel = arena.block_numel(flat.dtype, 1, flat.numel(), _LARGE_BLOCK)
    blocks = arena.blocks(flat.dtype, numel, 1)
    for k in range(-(-flat.numel() // numel)):
        part = flat[k * numel : (k + 1) * numel]
        place = blocks[k % TURNS][root][0][: part.numel()]
        if arena.rank == root:
            place.copy_(part)
        arena.barrier(call)
        if arena.rank != root:
            part.copy_(place)
    arena.barrier(call)


def all_gather(arena: Arena, outputs: Sequence[Tensor], flat: Tensor, call: Call) -> None:
    """Copy each rank's tensor into `outputs[rank]` of every rank; all tensors are flat.

    `flat` may share the memory of our own output.
    """
    max_numel = max(output.numel() for output in outputs)
    numel = arena.block_numel(flat.dtype, 1, max_numel, _LARGE_BLOCK)
    blocks = arena.blocks(flat.dtype, numel, 1)
    for k in range(-(-max_numel // numel)):
        now = blocks[k % TURNS]
        mine = flat[k * numel : (k + 1) * numel]
        now[arena.rank][0][: mine.numel()].copy_(mine)
        arena.barrier(call)
        for rank, output in enumerate(outputs):
            part = output[k * numel : (k + 1) * numel]
            part.copy_(now[rank][0][: part.numel()])
    arena.barrier(call)


def all_to_all(
    arena: Arena, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: Call
) -> None:
    """Receive into `outputs[i]` what rank i has for us; all tensors are flat and of one size."""
    size, rank, total = arena.size, arena.rank, inputs[0].numel()
    numel = arena.block_numel(inputs[0].dtype, size, total)
    blocks = arena.blocks(inputs[0].dtype, numel, size)
    for k in range(-(-total // numel)):
        now = blocks[k % TURNS]
        for owner in range(size):
            part = inputs[owner][k * numel : (k + 1) * numel]
            now[rank][owner][: part.numel()].copy_(part)
        arena.barrier(call)
        for source in range(size):
            part = outputs[source][k * numel : (k + 1) * numel]
            part.copy_(now[source][rank][: part.numel()])
    arena.barrier(call)
