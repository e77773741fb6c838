"""The collectives that return at once: each submits a request to the engine and returns a handle;
`synchronize(handle)` waits for the result.

The signatures are Horovod's; `allstep.torch` explains the arguments and the errors that all of
them share. No autograd graph is made.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allstep.engine import Kind, Request
from allstep.hvd.handles import enqueue, enqueue_group, perform, synchronize
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import (
    Average,
    broadcasting,
    exchanging,
    gathering,
    group_names,
    handle_average_backwards_compatibility,
    named,
    number_of,
    reduction,
    scattering,
)

# Reductions


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request a new tensor: postscale * reduction over ranks of (prescale * tensor)."""
    op = handle_average_backwards_compatibility(op, average)
    how = op, prescale_factor, postscale_factor, process_set
    return enqueue(reduction(tensor, None, named("allreduce", name), *how))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request the reduction of `allreduce_async` in place."""
    op = handle_average_backwards_compatibility(op, average)
    how = op, prescale_factor, postscale_factor, process_set
    return enqueue(reduction(tensor, tensor, named("allreduce", name), *how))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request the allreduce of several tensors under one handle; the result is a tuple.

    No tensor is reduced before all ranks have submitted all of them.
    """
    op = handle_average_backwards_compatibility(op, average)
    how = op, prescale_factor, postscale_factor, process_set
    names = group_names("grouped_allreduce", name, tensors)
    return enqueue_group(
        [reduction(tensor, None, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request the reductions of `grouped_allreduce_async` in place."""
    op = handle_average_backwards_compatibility(op, average)
    how = op, prescale_factor, postscale_factor, process_set
    names = group_names("grouped_allreduce", name, tensors)
    return enqueue_group(
        [reduction(tensor, tensor, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Request the sum or average of sparse tensors.

    Return a function instead of a handle: it waits and returns an uncoalesced sparse tensor.
    """
    indices = allgather_async(tensor._indices().t(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def wait() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / process_set.size()
        return torch.sparse_coo_tensor(
            all_indices.t(), all_values, tensor.shape, device=tensor.device
        )

    return wait


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Request a reduction of which each rank gets some rows.

    Rows are distributed in the order of the ranks; the first ranks get one more if they are uneven.
    """
    return enqueue(
        scattering(
            tensor, named("reducescatter", name), op, process_set, prescale_factor, postscale_factor
        )
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Request the reducescatter of several tensors under one handle; the result is a tuple."""
    how = op, process_set, prescale_factor, postscale_factor
    names = group_names("grouped_reducescatter", name, tensors)
    return enqueue_group(
        [scattering(tensor, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


# Operations without arithmetic


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Request the rows of all ranks, in the order of the ranks.

    The number of rows may differ between ranks, other dimensions may not.
    """
    return enqueue(gathering(tensor, named("allgather", name), process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Request the allgather of several tensors under one handle; the result is a tuple."""
    names = group_names("grouped_allgather", name, tensors)
    return enqueue_group(
        [gathering(tensor, each, process_set) for tensor, each in zip(tensors, names, strict=True)]
    )


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request the root's tensor, as a new tensor."""
    return enqueue(broadcasting(tensor, None, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request the root's values, in place."""
    return enqueue(broadcasting(tensor, tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Request to send `splits[i]` rows to rank i; the result is (output, received_splits).

    `splits`: an int32 tensor or a list with one number per rank of the set; default: equally many
    rows for each rank.
    """
    return enqueue(exchanging(tensor, splits, name, process_set))


# Operations that wait


def join(device: int = -1) -> int:
    """Contribute zeros to the other ranks' allreduces until all ranks have joined.

    For a rank without further data. Return the rank that joined last. `device`: the GPU for the
    zeros; -1 (default) is the CPU.
    """
    last: int = perform(Request(Kind.JOIN, device=device))
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called it. Operations in progress are not waited for."""
    perform(Request(Kind.BARRIER, process_set=number_of(process_set)))
