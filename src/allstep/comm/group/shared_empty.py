"""Tensors in memory that all ranks of a host share, which collectives use without copies.

All ranks of a group call `shared_empty` together, like a collective. Each gets a tensor of its own,
whose storage has just its size (so that saving it saves no more). It is ordinary memory otherwise:
views, in-place operations and autograd work on it. The memory is released when the tensors of all
ranks are deleted.
"""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.group.within_host import SharedMemoryTransport
from allstep.comm.memory.segment import CannotShare, parts, rounded, share
from allstep.errors import CommError
from allstep.limits import read_limits


def shared_empty(
    shape: int | Sequence[int],
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return an uninitialized tensor in memory that the ranks of the host share.

    All ranks of `group` (default: all ranks) call it together, with the same `shape` and `dtype`;
    each gets a tensor of its own, which collectives read and write without copies. If a rank shares
    no memory with others (it is alone on its host, or the group has another backend), the tensor is
    an ordinary one, and collectives copy it.
    """
    size = torch.Size([shape] if isinstance(shape, int) else shape)
    chosen = group if group is not None else dist.distributed_c10d._get_default_group()
    if not isinstance(chosen, AllstepGroup) or not size.numel():
        return torch.empty(size, dtype=dtype)
    local = chosen.local
    if not isinstance(local, SharedMemoryTransport) or local.arena.size == 1:
        return torch.empty(size, dtype=dtype)
    return _in_segment(chosen, local, size, dtype)


def _in_segment(
    group: AllstepGroup, local: SharedMemoryTransport, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    nbytes = shape.numel() * dtype.itemsize
    rank, size = local.arena.rank, local.arena.size
    store = PrefixStore(
        f"shared/{local.plans.num_blocks}/{local.layout.host}", group.get_group_store()
    )
    seconds, check = read_limits().start, group.guard.check_for("shared_empty")
    try:
        segment = share(store, rank, size, size * rounded(nbytes), seconds, check)
    except CannotShare as error:
        raise CommError(
            f"shared_empty({list(shape)}, {dtype}): {nbytes} bytes on each of {size} ranks: {error}"
        ) from error
    ranges = list(parts(segment, *[nbytes] * size))
    tensor = torch.frombuffer(ranges[rank], dtype=dtype, count=shape.numel()).view(shape)
    storage = tensor.untyped_storage()
    local.plans.add_block(ranges, storage.data_ptr())
    weakref.finalize(storage, local.plans.forget_block, storage.data_ptr())
    return tensor
