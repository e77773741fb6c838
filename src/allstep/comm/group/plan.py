"""What an operation in shared memory needs, worked out once for each kind of call and kept.

Whether the ranks call the same thing is told by a mark, a checksum of what the operation is in words (`comm.op.describe`). Marks are made
here for every collective, also for those that Gloo carries.
"""

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from allstep.comm.memory import reduce as summing
from allstep.comm.memory.arena import BLOCK_BITS, Call
from allstep.comm.op.reduction import FOLD

RedOpType: Any = ReduceOp.RedOpType  # torch's stub shows an enumeration without members
COMBINE: dict[Any, summing.Combine] = {
    **FOLD,
    RedOpType.AVG: torch.add,  # divided afterwards
    RedOpType.PREMUL_SUM: torch.add,  # multiplied beforehand
}
_BITWISE = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Plan(NamedTuple):
    """How an operation on so many elements of a dtype is done."""

    call: Call
    places: tuple[tuple[Tensor, ...], ...]  # [turn][rank], when it is small
    combine: summing.Combine
    divide: bool
    scaled: bool  # each rank's tensor is first multiplied by a factor of its own
    shared: tuple[Tensor, ...] = ()  # large and in shared memory: the tensors of the host's ranks, flat
    blocks: tuple[tuple[Tensor, ...], ...] = ()  # of those, what this rank adds up on one host: `summing.own_blocks`


def call_of(said: str) -> Call:
    """A call by its words."""
    return Call(zlib.crc32(said.encode()) << BLOCK_BITS, said)


def can(dtype: torch.dtype, kind: Any) -> bool:
    """Whether torch's own kernels compute this reduction as it is; the rest is left to others."""
    if dtype not in _DTYPES or (kind is not None and kind not in COMBINE):
        return False
    if kind in _BITWISE:
        return dtype not in _FLOATS
    # a sum of halves may overflow where the mean does not
    return kind not in (RedOpType.AVG, RedOpType.PREMUL_SUM) or dtype in (torch.float32, torch.float64)


def flattened(tensor: Tensor) -> Tensor:
    """One dimension, without gradients: a view where it can be."""
    if tensor.dim() == 1 and not tensor.requires_grad and tensor.is_contiguous():
        return tensor
    return tensor.detach().reshape(-1)


def finish(tensor: Tensor, flat: Tensor, plan: Plan, size: int) -> None:
    """The average, and the way back for a tensor that had to be copied to be flat."""
    if plan.divide:
        flat.div_(size)
    if flat is tensor:
        return
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
