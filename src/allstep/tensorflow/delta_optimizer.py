"""Adasum for tf.compat.v1 optimizers: the ranks combine changes of weights, not gradients.

Each rank applies its own gradients; the changes since the last combination are combined by Adasum,
and every weight becomes its value then plus the combined change::

    start --own steps--> weight      change = weight - start
    start + Adasum of the changes -> weight, start of the next steps
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allstep.tensorflow.gradients import Reduction


class DeltaOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Wraps an optimizer, see the module.

    `passes`: the number of own steps before the changes are combined.
    """

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reduction: Reduction, passes: int
    ) -> None:
        super().__init__(
            name=name or f"DistributedDelta{type(optimizer).__name__}", use_locking=use_locking
        )
        if passes != 1:
            raise ValueError(
                f"op=Adasum with backward_passes_per_step={passes}: only 1 is possible for"
                " tf.compat.v1 optimizers; average the loss over several batches instead"
            )
        self._optimizer, self._reduction = optimizer, reduction

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return the gradients of this rank."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Sequence[Any], global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply the gradients of this rank, and combine the changes of all ranks."""
        pairs = list(grads_and_vars)
        variables = [variable for grad, variable in pairs if grad is not None]
        starts = [_copied(variable) for variable in variables]
        with tf.control_dependencies(_in_graph(starts)):
            applied = self._optimizer.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies(_in_graph([applied])):
            changes = [
                _copied(variable) - start for variable, start in zip(variables, starts, strict=True)
            ]
            combined = self._reduction.of_list(changes, [False] * len(changes), self.get_name())
            assigned = [
                tf.compat.v1.assign(variable, start + change)
                for variable, start, change in zip(variables, starts, combined, strict=True)
            ]
        return None if tf.executing_eagerly() else tf.group(*assigned)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the slots of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


def _copied(variable: Any) -> Any:
    """Return the value now, in memory of its own: a read may be the variable's memory."""
    value = variable.read_value() if hasattr(variable, "read_value") else variable
    return value + tf.zeros([], value.dtype)


def _in_graph(values: Sequence[Any]) -> list[Any]:
    """Return what control dependencies can take; eager values are already computed."""
    return [] if tf.executing_eagerly() else [each for each in values if each is not None]
