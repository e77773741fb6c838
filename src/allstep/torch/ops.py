"""The collectives that wait for their result.

Their arguments are explained in `allstep.torch`. The names without a trailing underscore are
differentiable: `autograd` has the gradients. A compressed tensor is decompressed before it is
returned.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from allstep.hvd.handles import perform, perform_group
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import (
    Average,
    broadcasting,
    group_names,
    handle_average_backwards_compatibility,
    named,
    reduction,
)
from allstep.torch.autograd import (
    HorovodAllgather,
    HorovodAllreduce,
    HorovodAlltoall,
    HorovodBroadcast,
    HorovodGroupedAllgather,
    HorovodGroupedAllreduce,
    HorovodGroupedReducescatter,
    HorovodReducescatter,
    apply,
)
from allstep.torch.compression import Compression, Compressor

# Reductions


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return a new tensor: postscale * reduction over ranks of (prescale * tensor)."""
    op = handle_average_backwards_compatibility(op, average)
    sent, ctx = compression.compress(tensor)
    result = apply(
        HorovodAllreduce, sent, None, name, op, prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(result, ctx)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place as `allreduce` does, and return it. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    how = op, prescale_factor, postscale_factor, process_set
    result: Tensor = perform(reduction(tensor, tensor, named("allreduce", name), *how))
    return result


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors at once as `allreduce` does; return a list of new tensors."""
    op = handle_average_backwards_compatibility(op, average)
    how = None, name, op, prescale_factor, postscale_factor, process_set
    return _apply_compressed(compression, tensors, HorovodGroupedAllreduce, *how)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place, and return them. Not differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    how = op, prescale_factor, postscale_factor, process_set
    names = group_names("grouped_allreduce", name, tensors)
    return perform_group(
        [reduction(tensor, tensor, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce over the ranks, and return the rows of this rank (see `reducescatter_async`)."""
    sent, ctx = compression.compress(tensor)
    result = apply(
        HorovodReducescatter, sent, name, op, process_set, prescale_factor, postscale_factor
    )
    return compression.decompress(result, ctx)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Do a reducescatter of several tensors at once; return a list of this rank's rows."""
    how = name, op, process_set, prescale_factor, postscale_factor
    return _apply_compressed(compression, tensors, HorovodGroupedReducescatter, *how)


def _apply_compressed(
    compression: type[Compressor], tensors: Sequence[Tensor], function: type[Function], *how: Any
) -> list[Tensor]:
    """Apply a grouped function to the compressed tensors; return its results decompressed."""
    sent = [compression.compress(tensor) for tensor in tensors]
    results = apply(function, *how, *(tensor for tensor, _ in sent))
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)
    ]


# Operations without arithmetic


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks (see `allgather_async`)."""
    result: Tensor = apply(HorovodAllgather, tensor, name, process_set)
    return result


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Do an allgather of several tensors at once; return a tuple of new tensors."""
    result: tuple[Tensor, ...] = apply(HorovodGroupedAllgather, name, process_set, *tensors)
    return result


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the root's tensor on all ranks, as a new tensor."""
    result: Tensor = apply(HorovodBroadcast, tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Copy the root's values into the tensor of each rank, and return it. Not differentiable."""
    result: Tensor = perform(broadcasting(tensor, tensor, root_rank, name, process_set))
    return result


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i of the set; return (output, received_splits).

    `splits`: an int32 tensor or a list with one number per rank. Without it (default), all ranks
    get equally many rows, and only the output is returned.
    """
    return apply(HorovodAlltoall, tensor, splits, name, process_set)
