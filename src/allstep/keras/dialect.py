"""What our callbacks need of Keras 3, as functions; see `keras_shared.collective_callbacks`."""

from collections.abc import Sequence
from typing import Any

import keras

from allstep.keras.framework_arrays import to_array
from allstep.keras.variables import broadcast_variables
from allstep.keras_shared.before_training import without_xla
from allstep.keras_shared.sample_arrays import numpy_array

__all__ = [
    "aggregation",
    "as_array",
    "assign",
    "broadcast",
    "build_optimizer",
    "check_exact",
    "floatx",
    "in_order",
    "is_variable",
    "optimizer_variables",
    "scale",
    "switch_xla_off",
    "to_array",
    "velocities",
]


def is_variable(thing: Any) -> bool:
    """Return whether this is a variable of Keras 3."""
    return isinstance(thing, keras.Variable)


def check_exact(what: str) -> None:
    """Do nothing: Keras 3 has no place where hvd.batches or hvd.evaluate does not work."""


def as_array(value: Any) -> Any:
    """Return a numpy array with the values of a tensor or array, without a copy if it can."""
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    return numpy_array(value)


def floatx() -> str:
    """Return the name of the type that Keras computes in."""
    name: str = keras.backend.floatx()
    return name


def assign(variable: Any, array: Any) -> None:
    """Give a variable the values of a numpy array."""
    variable.assign(array)


def aggregation(variable: Any) -> str:
    """Return how replicas of a metric's variable are combined: "sum", "mean", ..."""
    return getattr(variable, "aggregation", "sum")


def in_order(model: Any, logs: dict[str, Any]) -> Any:
    """Return the results of metrics as `model.evaluate` does, which has no public function."""
    return model._flatten_metrics_in_order(logs)


def switch_xla_off(model: Any) -> None:
    """Switch XLA off on TensorFlow; the other backends can call us from it."""
    if keras.backend.backend() == "tensorflow":
        without_xla(model)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the variables of an optimizer, if it has none yet."""
    if not optimizer.built:
        optimizer.build(variables)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer."""
    return list(optimizer.variables)


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Copy the values of a rank into these variables on all ranks."""
    broadcast_variables(variables, root_rank)


def scale(variable: Any, factor: float) -> None:
    """Multiply a variable by a number."""
    variable.assign(variable * keras.ops.cast(factor, variable.dtype))


def velocities(optimizer: Any) -> list[Any]:
    """Return the variables that contain past learning rates: those of SGD and RMSprop."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, keras.optimizers.SGD):
        return list(getattr(optimizer, "momentums", ()))
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return list(getattr(optimizer, "_momentums", ()))
    return []
