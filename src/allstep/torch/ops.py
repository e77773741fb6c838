"""The calls that wait, and their gradients.

A collective is a function of the tensors of all ranks, and the loss of every rank may depend on its
result. So the gradient of a collective is a collective itself: backward must run on all ranks in
the same order, as forward did. Nothing is saved for it but numbers, so a graph may be gone through
twice.

============
====================================================================================================
forward       gradient of its input ============
====================================================================================================
allreduce     the same reduction of the gradients (also for Min, Max and Product, as in Horovod)
allgather     the average of the gradients, of which we take our rows broadcast     the average of
the gradients on the root, zero elsewhere alltoall      the rows sent back where they came from
reducescatter the gradients of all, gathered; times the number of ranks for a Sum, times the factors
============
====================================================================================================

The plain functions take the same arguments as the asynchronous ones (see there); what they compress
is decompressed again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.hvd.place import rank
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.torch.compression import Compression, Compressor
from allstep.torch.handles import perform, perform_group
from allstep.torch.requests import (
    Average,
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


def _apply(function: type[Function], *args: Any) -> Any:
    """`function.apply`, to which torch gives no types."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


# Reductions


class HorovodAllreduce(Function):
    """apply(tensor, average, name, op, prescale_factor, postscale_factor, process_set)"""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, average: bool | None, name: str | None, op: int | None, *how: Any
    ) -> Tensor:
        ctx.op, ctx.how = handle_average_backwards_compatibility(op, average), how
        result: Tensor = perform(reduction(tensor, None, named("allreduce", name), ctx.op, *how))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _apply(HorovodAllreduce, grad, None, None, ctx.op, *ctx.how), *[None] * 6


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
    """postscale * reduction over ranks of (prescale * tensor); Average if nothing is said.

    Differentiable.
    """
    op = handle_average_backwards_compatibility(op, average)
    sent, ctx = compression.compress(tensor)
    result = _apply(
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
    """In place; returns the tensor itself. Not differentiable."""
    how = (
        handle_average_backwards_compatibility(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    result: Tensor = perform(reduction(tensor, tensor, named("allreduce", name), *how))
    return result


class HorovodGroupedAllreduce(Function):
    """apply(average, name, op, prescale_factor, postscale_factor, process_set, *tensors)"""

    @staticmethod
    def forward(
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = (
            handle_average_backwards_compatibility(op, average),
            prescale_factor,
            postscale_factor,
            process_set,
        )
        names = group_names("grouped_allreduce", name, tensors)
        return perform_group(
            [
                reduction(tensor, None, each, *ctx.how)
                for tensor, each in zip(tensors, names, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *[None] * 6, *_apply(HorovodGroupedAllreduce, None, None, *ctx.how, *grads)


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
    """Many tensors at once: a list of new ones. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    sent = [compression.compress(tensor) for tensor in tensors]
    results = _apply(
        HorovodGroupedAllreduce,
        None,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        *(tensor for tensor, _ in sent),
    )
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """In place; returns the tensors themselves. Not differentiable."""
    how = (
        handle_average_backwards_compatibility(op, average),
        prescale_factor,
        postscale_factor,
        process_set,
    )
    names = group_names("grouped_allreduce", name, tensors)
    return perform_group(
        [reduction(tensor, tensor, each, *how) for tensor, each in zip(tensors, names, strict=True)]
    )


class HorovodReducescatter(Function):
    """apply(tensor, name, op, process_set, prescale_factor, postscale_factor)"""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        *factors: float,
    ) -> Tensor:
        ctx.op, ctx.process_set, ctx.factors = op, process_set, factors
        result: Tensor = perform(
            scattering(tensor, named("reducescatter", name), op, process_set, *factors)
        )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scaled = grad * _scattered_scale(ctx.op, ctx.process_set, *ctx.factors)
        return allgather(scaled, process_set=ctx.process_set), *[None] * 5


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce, and keep our share of the rows. Differentiable."""
    sent, ctx = compression.compress(tensor)
    result = _apply(
        HorovodReducescatter, sent, name, op, process_set, prescale_factor, postscale_factor
    )
    return compression.decompress(result, ctx)


class HorovodGroupedReducescatter(Function):
    """apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)"""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, process_set, prescale_factor, postscale_factor
        names = group_names("grouped_reducescatter", name, tensors)
        return perform_group(
            [
                scattering(tensor, each, *ctx.how)
                for tensor, each in zip(tensors, names, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale = _scattered_scale(*ctx.how)
        _, process_set, *_ = ctx.how
        return *[None] * 5, *grouped_allgather(
            [grad * scale for grad in grads], process_set=process_set
        )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Many tensors at once: a list of our shares. Differentiable."""
    sent = [compression.compress(tensor) for tensor in tensors]
    results = _apply(
        HorovodGroupedReducescatter,
        name,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        *(tensor for tensor, _ in sent),
    )
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)
    ]


def _scattered_scale(op: int, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    return (process_set.size() or 1 if op == Sum else 1) * prescale * postscale


# Moving


class HorovodAllgather(Function):
    """apply(tensor, name, process_set)"""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        result: Tensor = perform(gathering(tensor, named("allgather", name), process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averaged = allreduce(grad, op=Average, process_set=ctx.process_set)
        return _own_rows([averaged], [ctx.rows], ctx.process_set)[0], None, None


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The rows of all ranks, in the order of the ranks. Differentiable."""
    result: Tensor = _apply(HorovodAllgather, tensor, name, process_set)
    return result


class HorovodGroupedAllgather(Function):
    """apply(name, process_set, *tensors)"""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        names = group_names("grouped_allgather", name, tensors)
        return perform_group(
            [
                gathering(tensor, each, process_set)
                for tensor, each in zip(tensors, names, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        averaged = grouped_allreduce(grads, op=Average, process_set=ctx.process_set)
        return None, None, *_own_rows(averaged, ctx.rows, ctx.process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Many tensors at once. Differentiable."""
    result: tuple[Tensor, ...] = _apply(HorovodGroupedAllgather, name, process_set, *tensors)
    return result


def _own_rows(
    gathered: Sequence[Tensor], rows: Sequence[int], process_set: ProcessSet
) -> list[Tensor]:
    """Of each gathered tensor the rows that came from us.

    All ranks of the set tell each other how many they gave.
    """
    ours = process_set.rank() or 0
    given = perform(gathering(torch.tensor([rows]), "", process_set))
    starts = given[:ours].sum(0).tolist()
    return [
        whole[start : start + count]
        for whole, start, count in zip(gathered, starts, rows, strict=True)
    ]


class HorovodBroadcast(Function):
    """apply(tensor, root_rank, name, process_set)"""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = perform(broadcasting(tensor, None, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averaged = allreduce(grad, op=Average, process_set=ctx.process_set)
        return averaged if rank() == ctx.root_rank else torch.zeros_like(averaged), None, None, None


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The root's tensor, as a new one. Differentiable."""
    result: Tensor = _apply(HorovodBroadcast, tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The root's values, in place; returns the tensor itself. Not differentiable."""
    result: Tensor = perform(broadcasting(tensor, tensor, root_rank, name, process_set))
    return result


class HorovodAlltoall(Function):
    """apply(tensor, splits, name, process_set)"""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        output, received = perform(exchanging(tensor, splits, name, process_set))
        ctx.received, ctx.rows, ctx.process_set = received.tolist(), tensor.shape[0], process_set
        if splits is None:
            return output
        if isinstance(splits, Tensor):
            received = received.to(splits.device)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_splits: Any) -> Any:
        back, _ = alltoall(grad, ctx.received, process_set=ctx.process_set)
        unsent = ctx.rows - back.shape[0]
        return (
            torch.cat([back, back.new_zeros(unsent, *back.shape[1:])]) if unsent else back,
            None,
            None,
            None,
        )


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i of the set:

    (output, received_splits). Without splits equal parts, and only the output.
    """
    return _apply(HorovodAlltoall, tensor, splits, name, process_set)
