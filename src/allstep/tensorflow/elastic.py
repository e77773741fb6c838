"""Elastic training with TensorFlow: `hvd.elastic.run` and the states of variables and models.

`allstep.hvd.elastic` explains how it works.

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, batches):
            ...
            state.commit()

    train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0))
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import tensorflow as tf

from allstep.hvd.elastic import ObjectState, run
from allstep.hvd.objects import broadcast_object
from allstep.hvd.place import rank
from allstep.tensorflow.bridge import to_torch
from allstep.tensorflow.functions import broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class _VariablesState(ObjectState):
    """A state of variables and plain attributes.

    `find_variables`: returns the variables now; an optimizer makes its own in the first step.
    `session`: in which the variables are, in a graph.
    """

    def __init__(
        self, find_variables: Callable[[], Sequence[Any]], session: Any, **kwargs: Any
    ) -> None:
        self._find_variables, self._session = find_variables, session
        self._sync_op: Any = None
        self._saved_values: list[Any] = []
        self._saved_values = self._values()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def save(self) -> None:
        """Save all values."""
        self._saved_values = self._values()
        super().save()

    def restore(self) -> None:
        """Return to the saved values."""
        for variable, value in zip(self._find_variables(), self._saved_values, strict=False):
            self._set(variable, value)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's values, and save them. A collective."""
        if self._session is None:
            broadcast_variables(self._find_variables(), root_rank=0)
        else:
            self._session.run(self._sync_operation())
        super().sync()

    def _values(self) -> list[Any]:
        """Return copies of the values, in the memory of the last ones where they fit."""
        variables = list(self._find_variables())
        if self._session is None:
            room = [*self._saved_values, *[None] * len(variables)]
            return [_copied(*pair) for pair in zip(variables, room, strict=False)]
        values: list[Any] = self._session.run(variables)
        return values

    def _set(self, variable: Any, value: Any) -> None:
        if self._session is None:
            # A variable may use the memory of what it is assigned.
            variable.assign(value.copy())
        else:
            variable.load(value, self._session)

    def _sync_operation(self) -> Any:
        if self._sync_op is None:
            with self._session.graph.as_default():
                self._sync_op = broadcast_variables(self._find_variables(), root_rank=0)
        return self._sync_op


class TensorFlowState(_VariablesState):
    """The state of TensorFlow variables.

    `variables`: default: all global variables of the graph. `session`: the Session of a graph
    (default: the current one). `kwargs`: further values, such as epoch and batch.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if not tf.executing_eagerly():
            session = session or tf.compat.v1.get_default_session()
        if variables is None:
            variables = tf.compat.v1.global_variables()
        self.variables, self.session = list(variables), session
        super().__init__(lambda: self.variables, session, **kwargs)


class TensorFlowKerasState(_VariablesState):
    """The state of a Keras model and its optimizer on TensorFlow.

    `optimizer`: default: that of the model. `backend`: Horovod's; not used. `kwargs`: further
    values, such as epoch and batch. Raise ValueError if the model has no weights yet. In a graph
    of `tf.compat.v1` the variables are in Keras's Session.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True) or not _known_weights(model):
            raise ValueError(
                f"TensorFlowKerasState({type(model).__name__}): the model is not built; call"
                " model.build(input_shape), or the model with one batch, first"
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        self.backend = backend
        eager = tf.executing_eagerly()
        session = None if eager else tf.compat.v1.keras.backend.get_session()
        super().__init__(self._of_both, session, **kwargs)

    def _of_both(self) -> list[Any]:
        return [*self.model.variables, *optimizer_variables(self.optimizer)]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of Keras or tf.compat.v1; [] for None."""
    variables = getattr(optimizer, "variables", [])
    return list(variables() if callable(variables) else variables)


def _known_weights(model: Any) -> bool:
    """Return whether the weights exist; Keras 2 raises ValueError before."""
    try:
        return model.weights is not None
    except ValueError:
        return False


def _copied(variable: Any, room: Any) -> Any:
    """Return a variable's value as an array, in `room` if that fits."""
    tensor = tf.convert_to_tensor(variable)
    try:
        array = to_torch(tensor).numpy()
    # torch or numpy does not know the type.
    except (TypeError, ValueError):
        array = tensor.numpy()
    if room is None or (room.shape, room.dtype) != (array.shape, array.dtype):
        return array.copy()
    numpy.copyto(room, array)
    return room
