"""Plans of operations in shared memory, computed once for each kind of call and kept.

A mark, a checksum of the description of a call (`comm.op.describe`), shows whether all ranks call
the same operation. Every collective has one, also those that Gloo runs.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from allstep.comm.memory import reduce as summing
from allstep.comm.memory.arena import BLOCK_BITS, SMALL, Arena, Call
from allstep.comm.op.describe import describe, kind_of
from allstep.comm.op.reduction import FOLD

# torch's stub declares an enumeration without members.
RedOpType: Any = ReduceOp.RedOpType
COMBINE: dict[Any, summing.Combine] = {
    **FOLD,
    RedOpType.AVG: torch.add,  # divided afterwards
    RedOpType.PREMUL_SUM: torch.add,  # multiplied beforehand
}
_MAX_PLANS = 1000
_BITWISE = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Plan(NamedTuple):
    """How to run an operation on tensors of one shape and dtype."""

    call: Call
    places: tuple[tuple[Tensor, ...], ...]
    """For a small tensor: its places, [turn][rank]; else empty."""
    combine: summing.Combine
    divide: bool
    """Whether the sum is divided by the number of ranks."""
    scaled: bool
    """Whether each rank's tensor is first multiplied by a factor of its own."""
    shared: tuple[Tensor, ...] = ()
    """For a large tensor in shared memory: the tensors of the host's ranks, flat."""
    blocks: tuple[tuple[Tensor, ...], ...] = ()
    """The blocks of `shared` that this rank sums on one host: `summing.own_blocks`."""


class SharedBlock(NamedTuple):
    """The memory of one `shared_empty`: a tensor of the same size on every rank of the host."""

    number: int
    parts: Sequence[memoryview]
    """The memory of each rank's tensor, by rank."""


def call_of(text: str) -> Call:
    """Return the call with this description, and its mark."""
    return Call(zlib.crc32(text.encode()) << BLOCK_BITS, text)


def can(dtype: torch.dtype, kind: Any) -> bool:
    """Return whether torch's own kernels compute this reduction; if not, Gloo does."""
    if dtype not in _DTYPES or (kind is not None and kind not in COMBINE):
        return False
    if kind in _BITWISE:
        return dtype not in _FLOATS
    # In half precision the sum may overflow where the mean does not.
    is_exact = dtype in (torch.float32, torch.float64)
    return is_exact or kind not in (RedOpType.AVG, RedOpType.PREMUL_SUM)


def flattened(tensor: Tensor) -> Tensor:
    """Return the tensor in one dimension, without gradients; a view if possible."""
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous():
        return tensor
    return tensor.detach().reshape(-1)


def finish(tensor: Tensor, flat: Tensor, plan: Plan, size: int) -> None:
    """Divide for an average, and copy back if `flat` is a copy of `tensor`."""
    if plan.divide:
        flat.div_(size)
    if flat is tensor:
        return
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


class Plans:
    """Makes and keeps the plans of one group.

    `is_one_host`: whether all ranks of the group share the arena. `blocks` are the tensors in
    shared memory, by the address of our own; `num_blocks` is how many were ever made.
    """

    def __init__(self, arena: Arena, is_one_host: bool) -> None:
        self._arena, self._is_one_host = arena, is_one_host
        self._plans: dict[Any, Plan | None] = {}
        self.blocks: dict[int, SharedBlock] = {}
        self.num_blocks = 0

    def find(
        self, name: str, tensor: Tensor, op: Any, more: str = "", sizes_differ: bool = False
    ) -> Plan | None:
        """Return the plan of an operation, or None if shared memory does not support it.

        `op` is torch's reduction, None if there is none. `more` is what the ranks must agree on
        besides dtype and shape. `sizes_differ`: the ranks' shapes may differ, and `more` has what
        they agree on.
        """
        # A ReduceOp's hash is its number, and so is its RedOpType's; comparing the objects
        # themselves takes 1 us.
        kind = -1 if op is None else hash(op)
        key = (name, tensor.dtype, tensor.shape, kind, more, tensor.layout)
        try:
            return self._plans[key]
        except KeyError:
            if len(self._plans) > _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make(name, tensor, kind_of(op), more, sizes_differ)
            return plan

    def _make(
        self, name: str, tensor: Tensor, kind: Any, more: str, sizes_differ: bool
    ) -> Plan | None:
        if kind == RedOpType.PREMUL_SUM and name != "all_reduce":
            return None
        if tensor.layout != torch.strided or not tensor.numel() or not can(tensor.dtype, kind):
            return None
        if not self._is_one_host and name != "all_reduce":
            return None
        call = call_of(
            describe(name, tensor.dtype, None if sizes_differ else tensor.shape, kind, more)
        )
        small = tensor.numel() * tensor.element_size() <= SMALL and name in (
            "all_reduce",
            "reduce",
            "broadcast",
        )
        places = self._arena.small_places(tensor.dtype, tensor.numel()) if small else ()
        return Plan(
            call,
            places,
            COMBINE.get(kind, torch.add),
            kind == RedOpType.AVG,
            kind == RedOpType.PREMUL_SUM,
        )

    def add_block(self, parts: Sequence[memoryview], address: int) -> None:
        """Register memory in which every rank has a tensor. All ranks call it in the same order.

        `address` is that of our own tensor.
        """
        self.num_blocks += 1
        self.blocks[address] = SharedBlock(self.num_blocks, parts)

    def forget_block(self, address: int) -> None:
        """Remove a block whose tensor was deleted, and the plans that would keep its memory."""
        block = self.blocks.pop(address, None)
        for key in [key for key in self._plans if block is not None and key[0] == block.number]:
            del self._plans[key]

    def shared(self, tensor: Tensor, plan: Plan) -> Plan:
        """Return the plan with the tensors of all ranks, if this one is in shared memory."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is None or not tensor.is_contiguous():
            return plan
        offset = int(tensor.storage_offset()) * tensor.element_size()
        key = (block.number, offset, plan.call.mark)
        found = self._plans.get(key)
        if found is None:
            tensors = tuple(
                torch.frombuffer(part, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
                for part in block.parts
            )
            where = zlib.crc32(f"{block.number} {offset}".encode()) % ((1 << BLOCK_BITS) - 1) + 1
            call = Call(plan.call.mark | where, plan.call.text)
            blocks = summing.own_blocks(tensors, self._arena.rank) if self._is_one_host else ()
            found = self._plans[key] = plan._replace(call=call, shared=tensors, blocks=blocks)
        return found
