"""From the arguments of a collective to the engine's request: names, numbers of process sets and
operations, checks of types.

The engine checks shapes, roots and splits. No request is sent if a check fails.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp

from allstep.engine import Kind, Op, Request
from allstep.hvd.place import size
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.util import get_average_backwards_compatibility_fun, num_rank_is_power_2

# Plain numbers, since scripts compare, print and pickle them.
Average, Sum, Adasum, Min, Max, Product = (int(op) for op in Op)

REDUCTIONS = {
    Average: ReduceOp.SUM,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}
"""torch's reduction for each operation of an optimizer, except Adasum."""


class _ReduceOps:
    Average, Sum = Average, Sum


handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_ReduceOps)


def reduction(
    tensor: Tensor,
    output: Tensor | None,
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Request:
    """Return the request of an allreduce."""
    if op == Adasum:
        _check_adasum(process_set)
    kind = Kind.ADASUM if op == Adasum else Kind.ALLREDUCE
    return request(
        kind,
        name,
        tensor,
        process_set,
        output=output,
        op=_operation(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def scattering(
    tensor: Tensor,
    name: str,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Request:
    """Return the request of a reducescatter."""
    return request(
        Kind.REDUCESCATTER,
        name,
        tensor,
        process_set,
        op=_operation(op),
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def gathering(tensor: Tensor, name: str, process_set: ProcessSet) -> Request:
    """Return the request of an allgather."""
    return request(Kind.ALLGATHER, name, tensor, process_set)


def broadcasting(
    tensor: Tensor, output: Tensor | None, root_rank: int, name: str | None, process_set: ProcessSet
) -> Request:
    """Return the request of a broadcast."""
    return request(
        Kind.BROADCAST,
        named("broadcast", name),
        tensor,
        process_set,
        root=index(root_rank),
        output=output,
    )


def exchanging(
    tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None, process_set: ProcessSet
) -> Request:
    """Return the request of an alltoall."""
    return request(
        Kind.ALLTOALL, named("alltoall", name), tensor, process_set, splits=_parts(splits)
    )


def request(
    kind: Kind, name: str, tensor: Tensor, process_set: ProcessSet, **fields: Any
) -> Request:
    """Return the request of any operation on a tensor; raise TypeError for other inputs."""
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{kind.name.lower()} of {type(tensor).__name__}: expected a tensor, e.g."
            " torch.tensor(value)"
        )
    return Request(kind, name, tensor, process_set=number_of(process_set), **fields)


def number_of(process_set: ProcessSet) -> int:
    """Return the number by which the engine knows a process set."""
    if process_set.process_set_id is None:
        raise TypeError(
            f"{process_set} has no number: give it to hvd.init(process_sets=[...]) or"
            " hvd.add_process_set()"
        )
    return process_set.process_set_id


def named(prefix: str, name: str | None) -> str:
    """Return the full name by which ranks match an operation; "" lets the engine number it."""
    return f"{prefix}.{name}" if name else ""


def group_names(prefix: str, name: str | None, tensors: Sequence[Tensor]) -> list[str]:
    """Return a full name for each tensor of a group."""
    if not len(tensors):
        raise ValueError(f"{prefix} needs a list with at least one tensor")
    return [
        f"{prefix}.{name}_{number}of{len(tensors)}" if name else ""
        for number in range(1, len(tensors) + 1)
    ]


def _operation(number: int) -> Op:
    try:
        return Op(number)
    except ValueError:
        known = ", ".join(f"{op.name.capitalize()}={int(op)}" for op in Op)
        raise ValueError(f"op={number!r} is not a reduction; there are {known}") from None


def _check_adasum(process_set: ProcessSet) -> None:
    """Raise NotImplementedError unless the ranks form pairs, and pairs of pairs."""
    num_ranks = size()
    if process_set is not global_process_set:
        raise NotImplementedError(f"Adasum works on all ranks, not on {process_set}")
    if not num_rank_is_power_2(num_ranks):
        raise NotImplementedError(
            f"Adasum needs a number of ranks that is a power of 2, not {num_ranks}"
        )


def _parts(splits: Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    """Return the splits as numbers; None for equal splits."""
    if splits is None:
        return None
    if isinstance(splits, Tensor) and (splits.dtype != torch.int32 or splits.dim() > 1):
        raise ValueError(
            f"alltoall: splits must be int32 in one dimension, not {splits.dtype} of shape"
            f" {list(splits.shape)}"
        )
    return tuple(int(part) for part in torch.as_tensor(splits).flatten().tolist()) or None
