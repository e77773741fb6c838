"""The collectives on dense tensors, with their gradients, in eager mode and in graphs.

A collective is a function of the tensors of all ranks, so its gradient is a collective too:

| operation | gradient of its input |
|---|---|
| allreduce | the same reduction of the gradients (also for Min, Max and Product, as in Horovod) |
| allgather | our rows of the average of the gradients |
| broadcast | the average of the gradients on the root, zero elsewhere |
| alltoall | the rows, returned to the ranks that sent them |
| reducescatter | the gathered gradients times the factors; for Sum also times the ranks |

Nothing that depends on the world is a constant of a graph: it is read when the graph runs. The
arguments are explained in `allstep.tensorflow`.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor

from allstep.engine import Kind, Request
from allstep.hvd import place
from allstep.hvd.handles import perform, perform_group
from allstep.hvd.process_sets import ProcessSet, global_process_set
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
from allstep.tensorflow.calls import Called, Spec, run, unconverted, with_gradient
from allstep.tensorflow.place_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)

__all__ = [
    "allgather",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]

# Reductions


@unconverted
def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reduction of a dense tensor."""
    how = op, prescale_factor, postscale_factor, process_set
    called = Called("HorovodAllreduce", name, ignore_name_scope)

    def work(tensors: list[Tensor], name: str) -> list[Tensor]:
        return [perform(reduction(tensors[0], None, named("allreduce", name), *how))]

    @with_gradient
    def reduced(value: Any) -> Any:
        (result,) = run(work, [value], [Spec.like(value)], called)
        return result, lambda grad: _allreduce(
            grad, None, op, prescale_factor, postscale_factor, ignore_name_scope, process_set
        )

    return reduced(tf.convert_to_tensor(tensor))


@unconverted
def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the reductions of several dense tensors, as one operation."""
    how = op, prescale_factor, postscale_factor, process_set
    called = Called("HorovodGroupedAllreduce", name, ignore_name_scope)

    def work(given: list[Tensor], name: str) -> Sequence[Tensor]:
        names = group_names("grouped_allreduce", name, given)
        return perform_group(
            [reduction(each, None, one, *how) for each, one in zip(given, names, strict=True)]
        )

    def gradient(*grads: Any) -> list[Any]:
        return _grouped_allreduce(
            grads, None, op, prescale_factor, postscale_factor, ignore_name_scope, process_set
        )

    return _with_gradient(work, tensors, called, gradient)


def _with_gradient(work: Any, tensors: Sequence[Any], called: Called, gradient: Any) -> list[Any]:
    """Run an operation whose results have the shapes of its inputs, with a gradient."""

    @with_gradient
    def done(*values: Any) -> Any:
        return tuple(run(work, values, [Spec.like(each) for each in values], called)), gradient

    return list(done(*[tf.convert_to_tensor(each) for each in tensors]))


@unconverted
def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the reduction of a dense tensor."""
    how = op, process_set, prescale_factor, postscale_factor
    called = Called("HorovodReducescatter", name, ignore_name_scope)

    def work(tensors: list[Tensor], name: str) -> list[Tensor]:
        return [perform(scattering(tensors[0], named("reducescatter", name), *how))]

    @with_gradient
    def scattered(value: Any) -> Any:
        (result,) = run(work, [value], [_with_rows(value)], called)
        return result, lambda grad: allgather(
            grad * _scale_of(grad, *how), None, ignore_name_scope, process_set
        )

    return scattered(tf.convert_to_tensor(tensor))


@unconverted
def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's rows of the reductions of several dense tensors, as one operation."""
    how = op, process_set, prescale_factor, postscale_factor
    called = Called("HorovodGroupedReducescatter", name, ignore_name_scope)

    def work(given: list[Tensor], name: str) -> Sequence[Tensor]:
        names = group_names("grouped_reducescatter", name, given)
        return perform_group(
            [scattering(each, one, *how) for each, one in zip(given, names, strict=True)]
        )

    @with_gradient
    def scattered(*values: Any) -> Any:
        def gradient(*grads: Any) -> list[Any]:
            scaled = [grad * _scale_of(grad, *how) for grad in grads]
            return grouped_allgather(scaled, None, ignore_name_scope, process_set)

        return tuple(run(work, values, [_with_rows(each) for each in values], called)), gradient

    return list(scattered(*[tf.convert_to_tensor(each) for each in tensors]))


def _scale_of(
    grad: Any, op: int, process_set: ProcessSet, prescale: float, postscale: float
) -> Any:
    """Return the factor of a gradient of a reducescatter, in the dtype of the gradient."""
    factor = tf.cast(prescale * postscale, grad.dtype)
    return factor * tf.cast(_set_size(process_set), grad.dtype) if op == Sum else factor


@unconverted
def _set_size(process_set: ProcessSet) -> Any:
    """Return the number of ranks of a set, read when it is needed."""
    (result,) = run(
        lambda _tensors, _name: [torch.tensor(process_set.size() or 1, dtype=torch.int32)],
        [],
        [Spec(tf.int32, [])],
        Called("HorovodSize"),
    )
    return result


def _with_rows(tensor: Any) -> Spec:
    """Return the spec of a result with another number of rows."""
    shape = tensor.shape
    known = shape.rank is not None and shape.rank > 0
    return Spec(tensor.dtype, [None, *shape[1:]] if known else None)


# Operations without arithmetic


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows of all ranks, in the order of the ranks."""
    called = Called("HorovodAllgather", name, ignore_name_scope)

    def work(tensors: list[Tensor], name: str) -> list[Tensor]:
        return [perform(gathering(tensors[0], named("allgather", name), process_set))]

    @with_gradient
    def gathered(value: Any) -> Any:
        (result,) = run(work, [value], [_with_rows(value)], called)

        def gradient(grad: Any) -> Any:
            averaged = _allreduce(grad, None, Average, 1.0, 1.0, ignore_name_scope, process_set)
            return _own_rows([averaged], [value], process_set)[0]

        return result, gradient

    return gathered(tf.convert_to_tensor(tensor))


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the rows of all ranks for several tensors, as one operation."""
    called = Called("HorovodGroupedAllgather", name, ignore_name_scope)

    def work(given: list[Tensor], name: str) -> Sequence[Tensor]:
        names = group_names("grouped_allgather", name, given)
        return perform_group(
            [gathering(each, one, process_set) for each, one in zip(given, names, strict=True)]
        )

    @with_gradient
    def gathered(*values: Any) -> Any:
        def gradient(*grads: Any) -> list[Any]:
            averaged = _grouped_allreduce(
                grads, None, Average, 1.0, 1.0, ignore_name_scope, process_set
            )
            return _own_rows(averaged, values, process_set)

        return tuple(run(work, values, [_with_rows(each) for each in values], called)), gradient

    return list(gathered(*[tf.convert_to_tensor(each) for each in tensors]))


def _own_rows(gathered: Sequence[Any], own: Sequence[Any], process_set: ProcessSet) -> list[Any]:
    """Return the rows of each gathered tensor that came from this rank, with the shape of `own`.

    All ranks of the set exchange their numbers of rows. A collective.
    """
    rows = tf.stack([tf.cast(tf.shape(each)[0], tf.int64) for each in own])

    def work(tensors: list[Tensor], name: str) -> list[Tensor]:
        given = perform(gathering(tensors[0][None], named("allgather", name), process_set))
        return [given[: process_set.rank() or 0].sum(0)]

    (starts,) = run(work, [rows], [Spec(tf.int64, [len(own)])], Called("HorovodRows"))
    found = []
    for number, (whole, each) in enumerate(zip(gathered, own, strict=True)):
        part = whole[starts[number] : starts[number] + rows[number]]
        found.append(tf.ensure_shape(part, each.shape))
    return found


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor on all ranks."""
    called = Called("HorovodBroadcast", name, ignore_name_scope)

    def work(tensors: list[Tensor], name: str) -> list[Tensor]:
        return [perform(broadcasting(tensors[0], None, root_rank, name, process_set))]

    @with_gradient
    def sent(value: Any) -> Any:
        (result,) = run(work, [value], [Spec.like(value)], called)

        def gradient(grad: Any) -> Any:
            averaged = _allreduce(grad, None, Average, 1.0, 1.0, ignore_name_scope, process_set)
            return tf.where(tf.equal(rank_op(), root_rank), averaged, tf.zeros_like(averaged))

        return result, gradient

    return sent(tf.convert_to_tensor(tensor))


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[i]` rows to rank i of the set; return (output, received_splits).

    `splits`: one number per rank of the set. Without it (default), all ranks get equally many rows,
    and only the output is returned.
    """
    called = Called("HorovodAlltoall", name, ignore_name_scope)
    parts = tf.convert_to_tensor([] if splits is None else splits, tf.int32)

    def work(tensors: list[Tensor], name: str) -> Any:
        return perform(exchanging(tensors[0], tensors[1], name, process_set))

    @with_gradient
    def exchanged(value: Any) -> Any:
        results = [_with_rows(value), Spec(tf.int32, [None])]
        output, received = run(work, [value, parts], results, called)

        def gradient(grad: Any, *_received: Any) -> Any:
            back, _ = alltoall(grad, received, None, ignore_name_scope, process_set)
            unsent = tf.shape(value)[0] - tf.shape(back)[0]
            padding = [[0, unsent], *[[0, 0]] * (value.shape.rank - 1)]
            return tf.ensure_shape(tf.pad(back, padding), value.shape)

        return (output, received), gradient

    output, received = exchanged(tf.convert_to_tensor(tensor))
    return output if splits is None else (output, received)


@unconverted
def join() -> Any:
    """Contribute zeros to the other ranks' allreduces until all ranks have joined.

    For a rank without further data. Return the rank that joined last.
    """
    (last,) = run(
        lambda _tensors, _name: [torch.tensor(perform(Request(Kind.JOIN)), dtype=torch.int32)],
        [],
        [Spec(tf.int32, [])],
        Called("HorovodJoin"),
    )
    return last


rank, size, local_rank, local_size = place.rank, place.size, place.local_rank, place.local_size
