"""The calls that only ask: each hands a request to the engine and returns a handle at once;
`synchronize(handle)` waits for the result.

What every one of them promises, said once:

* Ranks are matched by name, in any order. `name=None` takes the number of the handle as the name,
  so all ranks must then have asked for equally many operations before.
* With a trailing underscore the result is written into the tensor that was given; without, the
  input is left alone. No autograd graph is made.
* `process_set` says among whom; `root_rank` is a rank of the world even so.
* A wrong argument is a ValueError here and nothing is asked; what goes wrong between ranks is a
  HorovodInternalError, from `synchronize`.

The signatures are Horovod's.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from allstep.engine import Kind, Request
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.torch.handles import ask, ask_group, perform, synchronize
from allstep.torch.requests import (
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
    """postscale * reduction over ranks of (prescale * tensor); Average if nothing is said.

    A new tensor.
    """
    how = (
        handle_average_backwards_compatibility(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return ask(reduction(tensor, None, named("allreduce", name), *how))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As `allreduce_async`, in place."""
    how = (
        handle_average_backwards_compatibility(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return ask(reduction(tensor, tensor, named("allreduce", name), *how))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Many tensors under one handle; none is reduced before all ranks have handed over all of them.

    The result is a tuple.
    """
    how = (
        handle_average_backwards_compatibility(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    names = group_names("grouped_allreduce", name, tensors)
    return ask_group(
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
    """As `grouped_allreduce_async`, in place."""
    how = (
        handle_average_backwards_compatibility(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    names = group_names("grouped_allreduce", name, tensors)
    return ask_group(
        [reduction(tensor, tensor, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Not a handle but a function that waits and returns the sum (or average) as an uncoalesced
    sparse tensor."""
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
    """Reduce, and keep our share of the rows; the first ranks get one row more where they do not
    come out even."""
    return ask(
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
    """Many tensors under one handle; the result is a tuple."""
    how = op, process_set, prescale_factor, postscale_factor
    names = group_names("grouped_reducescatter", name, tensors)
    return ask_group(
        [scattering(tensor, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


# Moving


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The rows of all ranks, in the order of the ranks.

    The number of rows may differ, other dimensions may not.
    """
    return ask(gathering(tensor, named("allgather", name), process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Many tensors under one handle; the result is a tuple."""
    names = group_names("grouped_allgather", name, tensors)
    return ask_group(
        [gathering(tensor, each, process_set) for tensor, each in zip(tensors, names, strict=True)]
    )


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The root's tensor, as a new one."""
    return ask(broadcasting(tensor, None, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """The root's values, in place."""
    return ask(broadcasting(tensor, tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Send `splits[i]` rows to rank i of the set, equal parts without `splits`.

    The result is (output, received_splits).
    """
    return ask(exchanging(tensor, splits, name, process_set))


# Meeting: these wait


def join(device: int = -1) -> int:
    """ "I have no more data": take part with zeros in the others' allreduces until all have joined.

    The rank that joined last.
    """
    last: int = perform(Request(Kind.JOIN, device=device))
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when all ranks of the set are here. Operations under way are not waited for."""
    perform(Request(Kind.BARRIER, process_set=number_of(process_set)))
