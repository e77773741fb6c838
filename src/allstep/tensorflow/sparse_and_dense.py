"""The reductions that users call: dense tensors, variables and IndexedSlices, with compression.

IndexedSlices are not added up: the rows of all ranks are gathered, with their indices. The sum of
rows with equal indices is what an IndexedSlices means, so the result is the reduction. The
arguments are explained in `allstep.tensorflow`.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import (
    Average,
    Sum,
    handle_average_backwards_compatibility,
)
from allstep.tensorflow.calls import unconverted
from allstep.tensorflow.compression import Compression
from allstep.tensorflow.mpi_ops import (
    _allreduce,
    _grouped_allreduce,
    _grouped_reducescatter,
    _reducescatter,
    _set_size,
    grouped_allgather,
)
from allstep.tensorflow.place_ops import check_set


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return postscale * reduction over ranks of (prescale * tensor).

    `tensor`: a tensor, a variable or IndexedSlices; for the last, the rows of all ranks are
    returned, and only Average and Sum without factors are possible.
    """
    op = handle_average_backwards_compatibility(op, average)
    check_set(process_set)
    if isinstance(tensor, tf.IndexedSlices):
        check_sparse(op, prescale_factor, postscale_factor)
        return gather_sparse([tensor], op, name, process_set, ignore_name_scope)[0]
    sent, ctx = compression.compress(tf.convert_to_tensor(tensor))
    how = op, prescale_factor, postscale_factor, ignore_name_scope, process_set
    return compression.decompress(_allreduce(sent, name, *how), ctx)


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Reduce several tensors as one operation, as `allreduce` does; return a list.

    An empty list is returned as it is. The list may have tensors and IndexedSlices.
    """
    op = handle_average_backwards_compatibility(op, average)
    check_set(process_set)
    if not tensors:
        return tensors
    sparse = [each for each in tensors if isinstance(each, tf.IndexedSlices)]
    dense = [each for each in tensors if not isinstance(each, tf.IndexedSlices)]
    if sparse:
        check_sparse(op, prescale_factor, postscale_factor)
    found_sparse = gather_sparse(sparse, op, name, process_set, ignore_name_scope)
    how = op, prescale_factor, postscale_factor, ignore_name_scope, process_set
    found_dense = compressed(compression, dense, lambda sent: _grouped_allreduce(sent, name, *how))
    return in_order(tensors, found_dense, found_sparse)


@unconverted
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce over the ranks, and return the rows of this rank."""
    _refuse_sparse("reducescatter", [tensor])
    sent, ctx = compression.compress(tf.convert_to_tensor(tensor))
    how = op, ignore_name_scope, process_set, prescale_factor, postscale_factor
    return compression.decompress(_reducescatter(sent, name, *how), ctx)


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Do a reducescatter of several tensors as one operation; return a list of our rows."""
    if not tensors:
        return tensors
    _refuse_sparse("grouped_reducescatter", tensors)
    how = op, False, process_set, prescale_factor, postscale_factor
    return compressed(compression, tensors, lambda sent: _grouped_reducescatter(sent, None, *how))


# Parts of these, which the optimizers use too


def compressed(compression: Any, tensors: Sequence[Any], reduce: Any) -> list[Any]:
    """Return what `reduce` makes of the compressed tensors, decompressed."""
    if not tensors:
        return []
    sent = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    results = reduce([tensor for tensor, _ in sent])
    return [
        compression.decompress(result, ctx) for result, (_, ctx) in zip(results, sent, strict=True)
    ]


def in_order(tensors: Sequence[Any], dense: Sequence[Any], sparse: Sequence[Any]) -> list[Any]:
    """Return the results of the dense and of the sparse tensors in the order of `tensors`."""
    found = {False: iter(dense), True: iter(sparse)}
    return [next(found[isinstance(each, tf.IndexedSlices)]) for each in tensors]


def check_sparse(op: int, prescale_factor: float = 1.0, postscale_factor: float = 1.0) -> None:
    """Raise NotImplementedError for a reduction that gathering rows cannot do."""
    if op not in (Average, Sum) or (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise NotImplementedError(
            f"a reduction of IndexedSlices with op={op}, prescale_factor={prescale_factor} and"
            f" postscale_factor={postscale_factor}: only Average and Sum without factors are"
            " possible; use sparse_as_dense=True, or tf.convert_to_tensor first"
        )


def gather_sparse(
    tensors: Sequence[Any],
    op: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Return the rows and indices of all ranks for each IndexedSlices, as one operation."""
    if not tensors:
        return []
    parts = [part for each in tensors for part in (each.values, each.indices)]
    how = name and f"{name}_sparse", ignore_name_scope, process_set
    gathered = grouped_allgather(parts, *how)
    return [
        tf.IndexedSlices(_averaged(values, op, process_set), indices, dense_shape=each.dense_shape)
        for each, values, indices in zip(tensors, gathered[::2], gathered[1::2], strict=True)
    ]


def _averaged(values: Any, op: int, process_set: ProcessSet) -> Any:
    return values / tf.cast(_set_size(process_set), values.dtype) if op == Average else values


def _refuse_sparse(what: str, tensors: Sequence[Any]) -> None:
    if any(isinstance(each, tf.IndexedSlices) for each in tensors):
        raise NotImplementedError(
            f"{what} of IndexedSlices: it distributes the rows of a dense tensor; use"
            " tf.convert_to_tensor first"
        )
