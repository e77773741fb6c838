"""DistributedOptimizer: for the optimizers of tf.compat.v1 here, for those of Keras in
`allstep.keras` and `allstep.keras2`.

The object decides (D21). These are layers above this one, imported when the first of their
optimizers comes.
"""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from allstep.hvd.place import rank
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import Adasum, Average
from allstep.tensorflow.compression import Compression
from allstep.tensorflow.delta_optimizer import DeltaOptimizer
from allstep.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from allstep.tensorflow.gradients import Reduction
from allstep.tensorflow.tape import check_groups, identity

_KERAS = "allstep.keras_shared.wrapped_optimizers"


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over the ranks before it applies them.

    - `optimizer`: of tf.compat.v1.train or of Keras.
    - `backward_passes_per_step`: the number of passes whose gradients are added up before they are
      reduced (default: 1). `average_aggregated_gradients`: whether the sum is divided by it.
    - `use_locking`: of tf.compat.v1 optimizers.
    - The others are those of `DistributedGradientTape`.
    """
    options = {key: value for key, value in locals().items() if key != "optimizer"}
    if op == Adasum and average_aggregated_gradients:
        raise ValueError(
            "op=Adasum with average_aggregated_gradients=True: Adasum reduces changes of weights,"
            " not gradients; leave average_aggregated_gradients out"
        )
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _of_keras(optimizer, options)
    if isinstance(optimizer, (_DistributedOptimizer, DeltaOptimizer)):
        raise ValueError(
            f"{optimizer.get_name()} is a distributed optimizer already: call"
            " hvd.DistributedOptimizer once"
        )
    check_groups(groups, num_groups)
    reduction = Reduction(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        process_set,
        scale_local_gradients,
    )
    if op == Adasum:
        return DeltaOptimizer(optimizer, name, use_locking, reduction, backward_passes_per_step)
    passes = backward_passes_per_step, average_aggregated_gradients
    return _DistributedOptimizer(optimizer, name, use_locking, reduction, *passes)


def _of_keras(optimizer: Any, options: dict[str, Any]) -> Any:
    if not hasattr(optimizer, "apply_gradients"):
        raise ValueError(
            f"DistributedOptimizer({type(optimizer).__name__}): expected an optimizer of"
            " tf.compat.v1.train or of Keras"
        )
    wrap: Any = importlib.import_module(_KERAS).DistributedOptimizer
    known = inspect.signature(wrap).parameters
    return wrap(optimizer, **{key: each for key, each in options.items() if key in known})


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Reduces the gradients in `compute_gradients`; the wrapped optimizer does the rest."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: Reduction,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(
            name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking
        )
        self._optimizer, self._reduction = optimizer, reduction
        self._local_vars: set[int] = set()
        self._agg_helper: LocalGradientAggregationHelper | None = None
        if backward_passes_per_step != 1:
            self._agg_helper = self._helper(backward_passes_per_step, average_aggregated_gradients)

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of this variable."""
        self._local_vars.add(identity(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return (gradient, variable) pairs, with reduced gradients."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if not pairs:
            return []
        grads, variables = zip(*pairs, strict=True)
        if self._agg_helper is None:
            found = self._reduce(grads, variables)
        else:
            found = self._agg_helper.compute_gradients(grads, variables)
        return list(zip(found, variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Apply gradients; with several passes per step, only in the last of them.

        `global_step` counts passes.
        """
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step, name)

        if self._agg_helper is None:
            return apply()
        return self._agg_helper.apply_gradients(
            apply, self._optimizer, pairs, global_step=global_step
        )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Return a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Return the names of the slots of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Return the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)

    def _helper(self, passes: int, average: bool) -> LocalGradientAggregationHelper:
        if tf.executing_eagerly():
            raise ValueError(
                f"backward_passes_per_step={passes} of a tf.compat.v1 optimizer found eager mode:"
                " it needs a graph; use a Keras optimizer, or"
                " tf.compat.v1.disable_eager_execution()"
            )
        return LocalGradientAggregationHelper(
            passes, self._reduce, self._reduction.sparse_as_dense, average, rank()
        )

    def _reduce(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        is_local = [identity(variable) in self._local_vars for variable in variables]
        return self._reduction.of_list(grads, is_local, self.get_name())
