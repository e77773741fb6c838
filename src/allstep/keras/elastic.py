"""Elastic training with Keras: `hvd.elastic.run`, `KerasState` and the callbacks that update it.

`allstep.hvd.elastic` explains how it works.

    @hvd.elastic.run
    def train(state):
        model.fit(data, epochs=epochs - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ])

    train(hvd.elastic.KerasState(model, epoch=0, batch=0))
"""

from typing import Any

import keras
import numpy

from allstep.hvd.elastic import ObjectState, run
from allstep.hvd.objects import broadcast_object
from allstep.hvd.place import rank
from allstep.keras import dialect
from allstep.keras_shared.before_training import is_built
from allstep.keras_shared.broadcast_callback import broadcast_model
from allstep.keras_shared.elastic_callbacks import CommitState, UpdateBatchState, UpdateEpochState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ObjectState):
    """The state of a Keras training: the variables of a model and of its optimizer.

    `model`: a model that has its weights. `optimizer`: default: that of the model. `kwargs`:
    further values, such as epoch and batch; each becomes an attribute.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not is_built(model):
            raise ValueError(
                f"KerasState: {model.name} has no weights yet: give it an Input, or call"
                " model.build(input_shape) before"
            )
        self.model = model
        found: Any = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self.optimizer = found
        if self.optimizer is None:
            raise ValueError(
                f"KerasState: {model.name} has no optimizer: call model.compile(...) before, or"
                " give optimizer="
            )
        dialect.build_optimizer(self.optimizer, model.trainable_variables)
        self._saved_variables: list[Any] = []
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)
        self._save_model()

    def save(self) -> None:
        """Save all values."""
        self._save_model()
        super().save()

    def restore(self) -> None:
        """Return to the saved values."""
        _take_from_step(self.model)
        for variable, saved in zip(self._variables(), self._saved_variables, strict=True):
            # A variable may use the memory of what it is assigned.
            variable.assign(saved.copy())
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's values, and save them. A collective."""
        _take_from_step(self.model)
        broadcast_model(dialect, self.model, self.optimizer, root_rank=0)
        super().sync()

    def _save_model(self) -> None:
        _take_from_step(self.model)
        variables = self._variables()
        room = [*self._saved_variables, *[None] * len(variables)]
        self._saved_variables = [_copied(*pair) for pair in zip(variables, room, strict=False)]

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]


# Keras has no type annotations.
class CommitStateCallback(CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = UpdateEpochState.__doc__


def _copied(variable: Any, room: Any) -> Any:
    """Return a variable's value as an array, in `room` if that fits."""
    array = keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(variable))
    if room is None or (room.shape, room.dtype) != (array.shape, array.dtype):
        return numpy.array(array, order="C")
    numpy.copyto(room, array)
    return room


def _take_from_step(model: Any) -> None:
    """Bring the values of the variables back from the step: on JAX `fit` keeps them elsewhere."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
