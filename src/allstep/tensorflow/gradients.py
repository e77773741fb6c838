"""The gradients of a step, reduced in one call (D20): for the tape and for v1 optimizers.

```
dense   compress -> one reduction of the whole list -> decompress
sparse  IndexedSlices: one gathering of all rows and indices
None    stays None
```

Outside of v1 graphs the dense list goes through `GradientList`: nothing is negotiated per step.
There, operations run one after the other, in the same order on all ranks. In a v1 graph several
lists may be reduced at the same time, so they are matched by name: a grouped allreduce.

A rank outside of the process set, and a set of one rank, get their gradients back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from torch import Tensor

from allstep.hvd.gradient_list import GradientList
from allstep.hvd.handles import perform_group
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.reduced_marks import mark_reduced
from allstep.hvd.requests import Adasum, Average, gathering, group_names, reduction
from allstep.tensorflow.calls import Called, Spec, run, unconverted, with_gradient
from allstep.tensorflow.compression import Compression
from allstep.tensorflow.mpi_ops import _grouped_allreduce, _set_size, _with_rows
from allstep.tensorflow.sparse_and_dense import check_sparse, compressed, in_order


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced, with the arguments of the tape and of the optimizers.

    `predivide`: the gradients are divided by it before the sum, and the sum is multiplied by it.
    """

    op: int = Average
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError(
                f"gradient_predivide_factor={self.predivide} with op={self.op}: it needs"
                " op=hvd.Average"
            )

    @unconverted
    def of_list(self, grads: Sequence[Any], is_local: Sequence[bool], scope: str) -> list[Any]:
        """Return the gradients: reduced, or those of this rank where `is_local`; all marked.

        All ranks of the set call it together. Gradients are known by number, since the names of
        variables may differ between the ranks. `scope`: the name of the operation in a graph.
        """
        found = [self._dense(grad) for grad in grads]
        shared = [
            number
            for number, (grad, local) in enumerate(zip(found, is_local, strict=True))
            if grad is not None and not local
        ]
        names = [f"grad_{number}" for number in shared]
        reduced = self._reduce([found[number] for number in shared], names, scope)
        by_number = dict(zip(shared, reduced, strict=True))
        return [
            mark_reduced(self.local(grad) if local else by_number.get(number))
            for number, (grad, local) in enumerate(zip(found, is_local, strict=True))
        ]

    @unconverted
    def local(self, grad: Any) -> Any:
        """Return the gradient of a variable that is not shared, divided by the ranks if wanted."""
        if grad is None or not self.scale_local_gradients:
            return grad
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(self.local(grad.values), grad.indices, grad.dense_shape)
        return grad / tf.cast(_set_size(self.process_set), grad.dtype)

    def _dense(self, grad: Any) -> Any:
        is_sparse = isinstance(grad, tf.IndexedSlices)
        return tf.convert_to_tensor(grad) if is_sparse and self.sparse_as_dense else grad

    def _reduce(self, grads: Sequence[Any], names: Sequence[str], scope: str) -> list[Any]:
        sparse = [grad for grad in grads if isinstance(grad, tf.IndexedSlices)]
        if sparse:
            check_sparse(self.op)
        named = [
            (name, grad)
            for name, grad in zip(names, grads, strict=True)
            if not isinstance(grad, tf.IndexedSlices)
        ]
        dense = compressed(
            self.compression,
            [grad for _, grad in named],
            lambda sent: self._reduce_dense(sent, [name for name, _ in named], scope),
        )
        return in_order(grads, dense, self._reduce_sparse(sparse, scope))

    def _reduce_dense(self, grads: Sequence[Any], names: Sequence[str], scope: str) -> list[Any]:
        work = _by_name if needs_names() or self.op == Adasum else _as_list(names)
        called = Called("HorovodGradients", _scoped(scope))

        @with_gradient
        def reduced(*values: Any) -> Any:
            def gradient(*upstream: Any) -> list[Any]:
                how = self.op, 1.0, 1.0, False, self.process_set
                return _grouped_allreduce(upstream, None, *how)

            specs = [Spec.like(value) for value in values]
            return tuple(run(lambda *given: work(self, *given), values, specs, called)), gradient

        if self.predivide == 1.0:
            return list(reduced(*grads))
        return [
            each * tf.cast(self.predivide, each.dtype)
            for each in reduced(*[grad / tf.cast(self.predivide, grad.dtype) for grad in grads])
        ]

    def _reduce_sparse(self, grads: Sequence[Any], scope: str) -> list[Any]:
        """Return the rows and indices of all ranks; for Average, values divided by the ranks."""
        if not grads:
            return []
        parts = [part for grad in grads for part in (grad.values, grad.indices)]
        specs = [_with_rows(part) for part in parts]
        called = Called("HorovodSparseGradients", _scoped(scope))
        found = run(self._gather, parts, specs, called)
        return [
            tf.IndexedSlices(values, indices, grad.dense_shape)
            for grad, values, indices in zip(grads, found[::2], found[1::2], strict=True)
        ]

    def _gather(self, parts: list[Tensor], name: str) -> Sequence[Tensor]:
        if not self.reduces():
            return parts
        names = group_names("grouped_allgather", name, parts)
        gathered = perform_group(
            [gathering(part, one, self.process_set) for part, one in zip(parts, names, strict=True)]
        )
        number = (self.process_set.size() or 1) if self.op == Average else 1
        return [
            part if index % 2 or number == 1 else part / number
            for index, part in enumerate(gathered)
        ]

    def reduces(self) -> bool:
        """Return whether this rank has others to reduce with, now."""
        return self.process_set.included() and (self.process_set.size() or 0) > 1


def _scoped(scope: str) -> str | None:
    """Return a name for the operation; None in eager mode, where the tape has none."""
    return None if tf.executing_eagerly() or not scope else scope


def needs_names() -> bool:
    """Return whether operations may run at the same time: in the graph of a Session."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def _by_name(how: Reduction, grads: list[Tensor], name: str) -> Sequence[Tensor]:
    """Reduce as a grouped allreduce of the engine."""
    if not how.reduces():
        return grads
    names = group_names("grouped_allreduce", name, grads)
    return perform_group(
        [
            reduction(grad, None, one, how.op, 1.0, 1.0, how.process_set)
            for grad, one in zip(grads, names, strict=True)
        ]
    )


# The lists of this process. A tape is made in each step, its list only once.
_lists: dict[Any, GradientList] = {}


def _as_list(names: Sequence[str]) -> Any:
    """Return a function that reduces through the list for these names and shapes."""

    def work(how: Reduction, grads: list[Tensor], name: str) -> Any:
        key = (tuple(names), how.op, how.process_set, *((g.shape, g.dtype) for g in grads))
        if key not in _lists:
            named = list(zip(names, grads, strict=True))
            _lists[key] = GradientList(named, op=how.op, process_set=how.process_set)
        return _lists[key].reduce(grads)

    return work
