"""Gradient accumulation inside a graph: several backward passes per reduction.

The gradients of each pass are added up in variables; in every n-th pass the sums are reduced and
applied, and the next pass begins with zeros. A pass is counted by a variable, so all of it is one
graph that a Session runs step by step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from allstep.hvd.process_sets import ProcessSet, global_process_set

v1 = tf.compat.v1

_COLLECTIONS = ["aggregating_collection"]


class LocalGradientAggregationHelper:
    """Adds up gradients and reduces them in every n-th pass.

    - `backward_passes_per_step`: n. `allreduce_func(grads, variables)`: reduces the sums.
    - `sparse_as_dense`: whether IndexedSlices become dense; without it they are refused.
    - `average_aggregated_gradients`: whether the reduced sums are divided by n.
    - `rank`, `optimizer_type`, `process_set`, `scale_local_gradients`: Horovod's; not used here.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        if backward_passes_per_step < 1:
            raise ValueError(
                f"backward_passes_per_step={backward_passes_per_step}: expected a number from 1"
            )
        self.backward_passes_per_step = backward_passes_per_step
        self.average_aggregated_gradients = average_aggregated_gradients
        self.sparse_as_dense = sparse_as_dense
        self.allreduce_grads = allreduce_func
        self.counter: Any = None
        self._sums: list[Any] = []

    def compute_gradients(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add up the gradients; return the reduced sums in an n-th pass, else the sums so far."""
        if self.backward_passes_per_step == 1:
            return list(self.allreduce_grads(grads, variables))
        dense = [self._dense(grad) for grad in grads]
        with v1.variable_scope(None, default_name="aggregation_variables"):
            self._make_variables(dense, variables)
        present = [number for number, grad in enumerate(dense) if grad is not None]
        with tf.control_dependencies(self._added([dense[number] for number in present])):
            counted = v1.assign_add(self.counter, 1)
        with tf.control_dependencies([counted]):
            owners = [variables[number] for number in present]
            found = tf.cond(self._is_last(counted), lambda: self._reduced(owners), self._sums_now)
        by_number = dict(zip(present, found, strict=True))
        return [by_number.get(number) for number in range(len(dense))]

    def apply_gradients(
        self,
        apply_grads_closure: Callable[[], Any],
        optimizer: Any,
        grads_and_vars: Sequence[Any],
        *args: Any,
        global_step: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return an operation that applies the gradients in an n-th pass, else only counts it.

        `apply_grads_closure`: applies them, and counts. `grads_and_vars`: what it applies, of
        `compute_gradients`. `global_step`: the variable that counts passes (default: none). The
        other arguments are Horovod's and not used.
        """
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()
        grads = [grad for grad, _ in grads_and_vars if grad is not None]
        with tf.control_dependencies(grads):
            return tf.cond(
                self._is_last(self.counter),
                lambda: self._applied(apply_grads_closure),
                lambda: tf.no_op() if global_step is None else v1.assign_add(global_step, 1).op,
            )

    def _applied(self, apply_grads: Callable[[], Any]) -> Any:
        with tf.control_dependencies([apply_grads()]):
            return v1.assign(self.counter, 0).op

    def _is_last(self, counted: Any) -> Any:
        return tf.equal(counted, self.backward_passes_per_step)

    def _make_variables(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        if self.counter is not None:
            raise ValueError("compute_gradients() of one optimizer was called twice in one graph")
        self.counter = _local_variable("aggregation_counter", [], tf.int32)
        for number, (grad, variable) in enumerate(zip(grads, variables, strict=True)):
            if grad is not None:
                self._sums.append(_local_variable(f"sum_{number}", variable.shape, grad.dtype))

    def _added(self, grads: Sequence[Any]) -> list[Any]:
        """Return the operations that add gradients; the first pass writes over the old sums.

        An infinity of the last step must not stay, so the sums are not multiplied by zero.
        """
        is_first = tf.equal(self.counter, 0)
        return [
            v1.assign(each, tf.where(is_first, grad, each + grad))
            for each, grad in zip(self._sums, grads, strict=True)
        ]

    def _sums_now(self) -> list[Any]:
        return [v1.identity(each) for each in self._sums]

    def _reduced(self, variables: Sequence[Any]) -> list[Any]:
        reduced = self.allreduce_grads(self._sums_now(), variables)
        if not self.average_aggregated_gradients:
            return list(reduced)
        return [grad / tf.cast(self.backward_passes_per_step, grad.dtype) for grad in reduced]

    def _dense(self, grad: Any) -> Any:
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices with"
                f" backward_passes_per_step={self.backward_passes_per_step}: rows cannot be added"
                " up; use sparse_as_dense=True"
            )
        return tf.convert_to_tensor(grad)


def _local_variable(name: str, shape: Any, dtype: Any) -> Any:
    """Return a variable of zeros that is neither trained nor saved."""
    return v1.get_variable(
        name,
        shape=shape,
        dtype=dtype,
        initializer=tf.zeros_initializer(),
        trainable=False,
        use_resource=True,
        collections=[v1.GraphKeys.LOCAL_VARIABLES, *_COLLECTIONS],
    )
