"""The collectives, where Horovod has them: `from allstep.mxnet.mpi_ops import ...`.

Their arguments are explained in `allstep.mxnet`. The rest is the same for every front-end and comes
from `allstep.hvd`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from allstep.engine import Request
from allstep.hvd.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    sycl_built,
)
from allstep.hvd.handles import perform, perform_group
from allstep.hvd.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from allstep.hvd.requests import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    broadcasting,
    exchanging,
    gathering,
    group_names,
    handle_average_backwards_compatibility,
    named,
    reduction,
    scattering,
)
from allstep.mxnet.framework import mx
from allstep.mxnet.mxnet_errors import InvalidArgument, mxnets_errors
from allstep.mxnet.ndarray_views import NDArray, read_view, to_mxnet, write_view

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
]

# Reductions


def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Return a new array: postscale * reduction over ranks of (prescale * tensor)."""
    with mxnets_errors():
        op = handle_average_backwards_compatibility(op, average)
        how = op, prescale_factor, postscale_factor, process_set
        result = perform(reduction(read_view(tensor), None, named("allreduce", name), *how))
        return to_mxnet(result, tensor)


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce an array in place as `allreduce` does, and return it."""
    with mxnets_errors():
        op = handle_average_backwards_compatibility(op, average)
        how = op, prescale_factor, postscale_factor, process_set
        view = write_view(tensor)
        perform(reduction(view, view, named("allreduce", name), *how))
        return tensor


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """Reduce several arrays at once as `allreduce` does; return a list of new arrays."""
    with mxnets_errors():
        op = handle_average_backwards_compatibility(op, average)
        how = op, prescale_factor, postscale_factor, process_set
        views = [read_view(tensor) for tensor in tensors]
        return _results(_reductions(views, [None] * len(views), name, how), tensors)


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Sequence[NDArray]:
    """Reduce several arrays in place, and return them."""
    with mxnets_errors():
        op = handle_average_backwards_compatibility(op, average)
        how = op, prescale_factor, postscale_factor, process_set
        views = [write_view(tensor) for tensor in tensors]
        requests = _reductions(views, views, name, how)
        if requests:
            perform_group(requests)
        return tensors


def reducescatter(
    tensor: NDArray,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Reduce over the ranks (Average or Sum), and return the rows of this rank.

    The first dimension is divided into as many ranges of rows as the set has ranks; the first
    ranges have one row more if it is not divisible.
    """
    with mxnets_errors():
        _check_scattered(op)
        how = op, process_set, prescale_factor, postscale_factor
        request = scattering(read_view(tensor), named("reducescatter", name), *how)
        return to_mxnet(perform(request), tensor)


def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray]:
    """Do a reducescatter of several arrays at once; return a list of this rank's rows."""
    with mxnets_errors():
        _check_scattered(op)
        how = op, process_set, prescale_factor, postscale_factor
        views = [read_view(tensor) for tensor in tensors]
        names = _names("grouped_reducescatter", name, views)
        requests = [scattering(view, each, *how) for view, each in zip(views, names, strict=True)]
        return _results(requests, tensors)


# Operations without arithmetic


def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the rows of all ranks, in the order of the ranks.

    The ranks may have different numbers of rows; the other dimensions are the same.
    """
    with mxnets_errors():
        request = gathering(read_view(tensor), named("allgather", name), process_set)
        return to_mxnet(perform(request), tensor)


def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """Do an allgather of several arrays at once; return a list of new arrays."""
    with mxnets_errors():
        views = [read_view(tensor) for tensor in tensors]
        names = _names("grouped_allgather", name, views)
        requests = [
            gathering(view, each, process_set) for view, each in zip(views, names, strict=True)
        ]
        return _results(requests, tensors)


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the root's array on all ranks, as a new array."""
    with mxnets_errors():
        request = broadcasting(read_view(tensor), None, root_rank, name, process_set)
        return to_mxnet(perform(request), tensor)


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Copy the root's values into the array of each rank, and return it."""
    with mxnets_errors():
        view = write_view(tensor)
        perform(broadcasting(view, view, root_rank, name, process_set))
        return tensor


def alltoall(
    tensor: NDArray,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i of the set; return (output, received_splits).

    `splits`: an NDArray of int32 or a list with one number per rank. Without it (default), all
    ranks get equally many rows, and only the output is returned.
    """
    with mxnets_errors():
        request = exchanging(read_view(tensor), _split_sizes(splits), name, process_set)
        output, received = perform(request)
        result = to_mxnet(output, tensor)
        if splits is None:
            return result
        return result, to_mxnet(received.to(torch.int32), tensor)


def _check_scattered(op: int) -> None:
    if op not in (Average, Sum):
        raise InvalidArgument(
            f"reducescatter with op={op}: only Average={Average} and Sum={Sum} are supported"
        )


# What grouped operations share


def _reductions(
    views: Sequence[Tensor],
    outputs: Sequence[Tensor | None],
    name: str | None,
    how: tuple[int, float, float, ProcessSet],
) -> list[Request]:
    """Return the requests of a grouped allreduce."""
    names = _names("grouped_allreduce", name, views)
    return [
        reduction(view, output, each, *how)
        for view, output, each in zip(views, outputs, names, strict=True)
    ]


def _names(prefix: str, name: str | None, views: Sequence[Tensor]) -> list[str]:
    """Return a full name for each array; none for an empty list, which Horovod allows."""
    return group_names(prefix, name, views) if views else []


def _results(requests: Sequence[Request], like: Sequence[NDArray]) -> list[NDArray]:
    """Perform requests as one group; return their results as arrays."""
    results = perform_group(requests) if requests else ()
    return [to_mxnet(result, each) for result, each in zip(results, like, strict=True)]


def _split_sizes(splits: Any) -> Any:
    return read_view(splits) if isinstance(splits, mx.nd.NDArray) else splits
