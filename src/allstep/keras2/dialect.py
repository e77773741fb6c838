"""What our callbacks need of Keras 2, as functions; see `keras_shared.collective_callbacks`.

Keras 2 has two kinds of optimizers. A new one has `build`; a legacy one creates its variables
("slots", by variable) in the first step. Both are built here before training, so that a broadcast
can precede the first step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.engine.training import flatten_metrics_in_order

from allstep.keras_shared.before_training import without_xla as switch_xla_off
from allstep.keras_shared.sample_arrays import numpy_array as as_array
from allstep.tensorflow.elastic import optimizer_variables
from allstep.tensorflow.functions import broadcast_variables

__all__ = [
    "aggregation",
    "as_array",
    "assign",
    "broadcast",
    "build_optimizer",
    "check_exact",
    "floatx",
    "in_order",
    "is_legacy",
    "is_variable",
    "optimizer_variables",
    "scale",
    "switch_xla_off",
    "to_array",
    "velocities",
]


def is_legacy(optimizer: Any) -> bool:
    """Return whether an optimizer is one of `tf.keras.optimizers.legacy`."""
    return isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)


def is_variable(thing: Any) -> bool:
    """Return whether this is a variable of TensorFlow, which Keras 2 uses."""
    return isinstance(thing, tf.Variable)


def to_array(value: Any) -> "np.ndarray[Any, Any]":
    """Return a copy of a variable, a tensor, an array or a number."""
    return np.array(tf_keras.backend.get_value(value))


def check_exact(what: str) -> None:
    """Raise ValueError in a graph of tf.compat.v1: Keras 2 has other data and metrics there."""
    if not tf.executing_eagerly():
        raise ValueError(
            f"{what} in a graph of tf.compat.v1: it needs eager mode; in a graph give model.fit and"
            " model.evaluate arrays with this rank's samples"
        )


def floatx() -> str:
    """Return the name of the type that Keras computes in."""
    name: str = tf_keras.backend.floatx()
    return name


def assign(variable: Any, array: Any) -> None:
    """Give a variable the values of a numpy array, also in a graph."""
    tf_keras.backend.set_value(variable, array)


def aggregation(variable: Any) -> str:
    """Return how replicas of a metric's variable are combined: "sum", "mean", ..."""
    name: str = variable.aggregation.name
    return name.lower()


def in_order(model: Any, logs: dict[str, Any]) -> Any:
    """Return the results of metrics as `model.evaluate` does."""
    return flatten_metrics_in_order(logs, model.metrics_names)


def build_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the variables of an optimizer, if it has none yet."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with tf.init_scope():
        if is_legacy(inner):
            inner._create_all_weights(variables)
        else:
            inner.build(variables)


def broadcast(variables: Sequence[Any], root_rank: int) -> None:
    """Copy the values of a rank into these variables on all ranks, also in a graph."""
    operation = broadcast_variables(variables, root_rank)
    if not tf.executing_eagerly():
        tf.compat.v1.keras.backend.get_session().run(operation)


def scale(variable: Any, factor: float) -> None:
    """Multiply a variable by a number."""
    tf_keras.backend.set_value(variable, to_array(variable) * factor)


def velocities(optimizer: Any) -> list[Any]:
    """Return the variables that contain past learning rates: those of SGD and RMSprop."""
    known, legacy = tf_keras.optimizers, tf_keras.optimizers.legacy
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, (legacy.SGD, legacy.RMSprop)):
        slots = optimizer._slots.values()
        return [each["momentum"] for each in slots if "momentum" in each]
    if isinstance(optimizer, known.SGD):
        return list(getattr(optimizer, "momentums", ()))
    if isinstance(optimizer, known.RMSprop):
        return list(getattr(optimizer, "_momentums", ()))
    return []
