"""The gradients of collectives, as autograd functions under Horovod's names.

A collective is a function of the tensors of all ranks, and the loss of every rank may depend on its
result. So the gradient of a collective is a collective too: backward must run on all ranks in the
same order, as forward did. Only numbers are saved for backward, so it may run twice on one graph.

| forward | gradient of its input |
|---|---|
| allreduce | the same reduction of the gradients (also for Min, Max and Product, as in Horovod) |
| allgather | our rows of the average of the gradients |
| broadcast | the average of the gradients on the root, zero elsewhere |
| alltoall | the rows, returned to the ranks that sent them |
| reducescatter | the gathered gradients times the factors; for Sum also times the ranks |

`ops` has the functions that users call; the arguments are explained in `allstep.torch`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from allstep.hvd.handles import perform, perform_group
from allstep.hvd.place import rank
from allstep.hvd.process_sets import ProcessSet
from allstep.hvd.requests import (
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


def apply(function: type[Function], *args: Any) -> Any:
    """Return `function.apply(*args)`, to which torch gives no types."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


# Reductions


class HorovodAllreduce(Function):
    """Allreduce with a gradient.

    `apply(tensor, average, name, op, prescale_factor, postscale_factor, process_set)`
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, average: bool | None, name: str | None, op: int | None, *how: Any
    ) -> Tensor:
        ctx.op, ctx.how = handle_average_backwards_compatibility(op, average), how
        result: Tensor = perform(reduction(tensor, None, named("allreduce", name), ctx.op, *how))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(HorovodAllreduce, grad, None, None, ctx.op, *ctx.how), *[None] * 6


class HorovodGroupedAllreduce(Function):
    """Allreduce of several tensors with a gradient.

    `apply(average, name, op, prescale_factor, postscale_factor, process_set, *tensors)`
    """

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
        op = handle_average_backwards_compatibility(op, average)
        ctx.how = op, prescale_factor, postscale_factor, process_set
        names = group_names("grouped_allreduce", name, tensors)
        return perform_group(
            [
                reduction(tensor, None, each, *ctx.how)
                for tensor, each in zip(tensors, names, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *[None] * 6, *apply(HorovodGroupedAllreduce, None, None, *ctx.how, *grads)


class HorovodReducescatter(Function):
    """Reducescatter with a gradient.

    `apply(tensor, name, op, process_set, prescale_factor, postscale_factor)`
    """

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
        return apply(HorovodAllgather, scaled, None, ctx.process_set), *[None] * 5


class HorovodGroupedReducescatter(Function):
    """Reducescatter of several tensors with a gradient.

    `apply(name, op, process_set, prescale_factor, postscale_factor, *tensors)`
    """

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
        scaled = [grad * scale for grad in grads]
        return *[None] * 5, *apply(HorovodGroupedAllgather, None, process_set, *scaled)


def _scattered_scale(op: int, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    """Return the factor of the gradients of a reducescatter."""
    return (process_set.size() or 1 if op == Sum else 1) * prescale * postscale


# Operations without arithmetic


def _average(grad: Tensor, process_set: ProcessSet) -> Tensor:
    """Return the average of the ranks' gradients. A collective."""
    result: Tensor = apply(HorovodAllreduce, grad, None, None, Average, 1.0, 1.0, process_set)
    return result


class HorovodAllgather(Function):
    """Allgather with a gradient.

    `apply(tensor, name, process_set)`
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        result: Tensor = perform(gathering(tensor, named("allgather", name), process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averaged = _average(grad, ctx.process_set)
        return _own_rows([averaged], [ctx.rows], ctx.process_set)[0], None, None


class HorovodGroupedAllgather(Function):
    """Allgather of several tensors with a gradient.

    `apply(name, process_set, *tensors)`
    """

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
        how = Average, 1.0, 1.0, ctx.process_set
        averaged = apply(HorovodGroupedAllreduce, None, None, *how, *grads)
        return None, None, *_own_rows(averaged, ctx.rows, ctx.process_set)


def _own_rows(
    gathered: Sequence[Tensor], rows: Sequence[int], process_set: ProcessSet
) -> list[Tensor]:
    """Return the rows of each gathered tensor that came from this rank.

    All ranks of the set exchange their numbers of rows. A collective.
    """
    ours = process_set.rank() or 0
    given = perform(gathering(torch.tensor([rows]), "", process_set))
    starts = given[:ours].sum(0).tolist()
    return [
        whole[start : start + count]
        for whole, start, count in zip(gathered, starts, rows, strict=True)
    ]


class HorovodBroadcast(Function):
    """Broadcast with a gradient.

    `apply(tensor, root_rank, name, process_set)`
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = perform(broadcasting(tensor, None, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        averaged = _average(grad, ctx.process_set)
        return averaged if rank() == ctx.root_rank else torch.zeros_like(averaged), None, None, None


class HorovodAlltoall(Function):
    """Alltoall with a gradient.

    `apply(tensor, splits, name, process_set)`
    """

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
        back, _ = apply(HorovodAlltoall, grad, ctx.received, None, ctx.process_set)
        unsent = ctx.rows - back.shape[0]
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return back, None, None, None
