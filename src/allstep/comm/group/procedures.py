"""The procedures of single collectives in shared memory, which all ranks of a host run together.

A procedure takes the arena and a plan, without a closure in between, because all_reduce of a small
tensor takes a few microseconds. `within_host` chooses the procedure, runs it in order and
finishes the result (average, copy back); the loops over pools and blocks are in `comm.memory`.

    one host        barrier, small, large, large_or_shared, reduce_scatter, small_broadcast
    several hosts   small_across, large_or_shared_across: `crossing` leads to the other hosts

`scale` is the factor of this rank's values, applied before the sum; None is no multiplication.
"""

from collections.abc import Sequence

from torch import Tensor

from allstep.comm.group import across_hosts as across_hosts
from allstep.comm.group.across_hosts import Crossing
from allstep.comm.group.plan import Plan
from allstep.comm.memory import reduce as summing
from allstep.comm.memory.arena import Arena, Call, MixedMemory, private_mark


def barrier(arena: Arena, call: Call) -> None:
    """Wait for all ranks of the host and compare their calls."""
    arena.barrier(call)


def small(
    arena: Arena, flat: Tensor, plan: Plan, scale: float | None = None, keep: bool = True
) -> None:
    """Reduce a small tensor in place. `keep`: whether this rank needs the result."""
    if scale is not None:
        flat.mul_(scale)
    summing.small(arena, flat, plan.places, plan.combine, plan.call, keep)


def large(arena: Arena, flat: Tensor, plan: Plan, keep: bool) -> None:
    """Reduce a large tensor in place, through the pools. `keep`: as for `small`."""
    summing.large(arena, flat, plan.combine, plan.call, keep)


def large_or_shared(arena: Arena, flat: Tensor, plan: Plan, scale: float | None) -> None:
    """Reduce a large tensor in place, without copies if the tensors of all ranks are shared.

    If those of some ranks are not in the same shared memory, all ranks go through the pools.
    """
    if plan.shared and scale is not None:
        flat.mul_(scale)
        scale = None
    try:
        if plan.shared:
            summing.shared(arena, plan.blocks, plan.combine, plan.call)
        else:
            summing.large(arena, flat, plan.combine, plan.call, scale=scale)
    except MixedMemory:
        summing.large(arena, flat, plan.combine, _as_private(plan.call), scale=scale)


def reduce_scatter(arena: Arena, output: Tensor, inputs: Sequence[Tensor], plan: Plan) -> None:
    """Reduce one input per rank and leave ours in `output`."""
    summing.reduce_scatter(arena, output, inputs, plan.combine, plan.call)


def small_broadcast(arena: Arena, flat: Tensor, plan: Plan, root: int) -> None:
    """Copy a small tensor of `root`, a rank of the host, to the others."""
    arena.turn = turn = 1 - arena.turn
    place = plan.places[turn][root]
    if arena.rank == root:
        place.copy_(flat)
    arena.barrier(plan.call)
    if arena.rank != root:
        flat.copy_(place)


def small_across(
    crossing: Crossing, arena: Arena, flat: Tensor, plan: Plan, scale: float | None
) -> None:
    """Reduce a small tensor in place, over several hosts."""
    if scale is not None:
        flat.mul_(scale)
    across_hosts.small(arena, crossing, flat, plan.places, plan.combine, plan.call)


def large_or_shared_across(
    crossing: Crossing, arena: Arena, flat: Tensor, plan: Plan, scale: float | None
) -> None:
    """Reduce a large tensor in place, over several hosts: as `large_or_shared` on one."""
    if scale is not None:
        flat.mul_(scale)
    try:
        if plan.shared:
            across_hosts.shared(arena, crossing, plan.shared, plan.combine, plan.call)
        else:
            across_hosts.large(arena, crossing, flat, plan.combine, plan.call)
    except MixedMemory:
        across_hosts.large(arena, crossing, flat, plan.combine, _as_private(plan.call))


def _as_private(call: Call) -> Call:
    return Call(private_mark(call.mark), call.text)
