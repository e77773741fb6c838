"""Keras on TensorFlow: one `tf.py_function` takes all gradients out of the graph.

Arguments and results cross as DLPack views, without a copy. A gradient can be a variable's own
memory (the gradient of w*w/2 is w), so it is only read; the results are in memory of our own, which
TensorFlow releases when it has used them. In eager mode there is no graph to leave: the reduction
is called directly, and its exceptions keep their class.

In the graph of a Session, which runs independent operations at the same time, the ranks match a
reduction by the name of its node.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from torch import Tensor

from allstep.keras_shared.gradient_reduction import Array, Reduction, Sparse
from allstep.tensorflow.bridge import is_plain, to_tensorflow, to_views
from allstep.tensorflow.calls import name_of
from allstep.tensorflow.gradients import needs_names

IN_PLACE = False


def reduce(
    reduction: Reduction, grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Reduce gradients: tensors, IndexedSlices or None. `variables` is not used."""
    if reduction.settings.sparse_as_dense:
        grads = [_dense(grad) for grad in grads]
    if tf.executing_eagerly():
        return _reduce_now(reduction, grads)
    return _reduce_in_graph(reduction, grads)


def wait() -> None:
    """Do nothing: a step has ended when its function returns."""


def forget_error() -> None:
    """Do nothing: an error is raised once."""


def conditional(flag: Any, update: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Call `update` if the flag is set, otherwise `skip`; in a graph when it runs.

    In a graph, return a tensor: what evaluates it runs one of them.
    """
    if isinstance(flag, bool):
        return (update if flag else skip)()
    # The branches of a condition return the same structure.
    return tf.cond(flag, lambda: _then_zero(update), lambda: _then_zero(skip))


def _then_zero(function: Callable[[], Any]) -> Any:
    """Call a function in a branch of a graph; return a tensor that needs what it did.

    Without the dependency a Session of `tf.compat.v1` would leave it out.
    """
    kinds = (tf.Operation, tf.Tensor)
    done = [each for each in tf.nest.flatten(function()) if isinstance(each, kinds)]
    with tf.control_dependencies(done):
        return tf.constant(0)


def _dense(grad: Any) -> Any:
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def _reduce_now(reduction: Reduction, grads: Sequence[Any]) -> tuple[bool, list[Any]]:
    parts = [part for grad in grads for part in _parts(grad)]
    views = to_views(parts, [False] * len(parts))
    updates, arrays = reduction.step(_arrays(grads, views))
    tensors = iter([to_tensorflow(part) for array in arrays for part in _array_parts(array)])
    return updates, [
        _with_parts(_kind(array), grad, tensors) for array, grad in zip(arrays, grads, strict=True)
    ]


def _reduce_in_graph(reduction: Reduction, grads: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Add the operation to the graph that is being traced."""
    parts = [part for grad in grads for part in _parts(grad)]
    plain = [is_plain(part) for part in parts]
    name: str | None = None

    def run(*tensors: Any) -> list[Any]:
        updates, arrays = reduction.step(_arrays(grads, to_views(tensors, plain)), name)
        present = [array for array, grad in zip(arrays, grads, strict=True) if grad is not None]
        results = [to_tensorflow(part) for array in present for part in _array_parts(array)]
        return [updates, *results]

    dtypes = [tf.bool, *(part.dtype for part in parts)]
    updates, *results = tf.py_function(run, parts, dtypes, name="HorovodGradients")
    name = name_of(updates.op) if needs_names() else None
    for result, part, is_sparse in zip(results, parts, _sparse_flags(grads), strict=True):
        # Ranks gather different numbers of rows.
        result.set_shape(part.shape if not is_sparse else [None, *part.shape[1:]])
    updates.set_shape(())
    tensors = iter(results)
    return updates, [_with_parts(_kind(grad), grad, tensors) for grad in grads]


# From a gradient to its parts and back. A dense gradient has one part, a sparse one has two.


def _kind(thing: Any) -> type | None:
    if thing is None:
        return None
    return Sparse if isinstance(thing, (tf.IndexedSlices, Sparse)) else Tensor


def _parts(grad: Any) -> list[Any]:
    if grad is None:
        return []
    return [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]


def _sparse_flags(grads: Sequence[Any]) -> list[bool]:
    return [_kind(grad) is Sparse for grad in grads for _ in _parts(grad)]


def _arrays(grads: Sequence[Any], views: Sequence[Tensor]) -> list[Array]:
    """Return one array for each gradient, from the views of all parts."""
    rest = iter(views)
    kinds = [_kind(grad) for grad in grads]
    return [
        None if kind is None else Sparse(next(rest), next(rest)) if kind is Sparse else next(rest)
        for kind in kinds
    ]


def _array_parts(array: Array) -> list[Tensor]:
    if array is None:
        return []
    return list(array) if isinstance(array, Sparse) else [array]


def _with_parts(kind: type | None, grad: Any, tensors: Any) -> Any:
    """Return a gradient of TensorFlow from the next tensors."""
    if kind is None:
        return None
    first = next(tensors)
    if kind is not Sparse:
        return first
    return tf.IndexedSlices(first, next(tensors), grad.dense_shape)
