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

from collections.abc import Callable
from typing import Any

import keras

from allstep.hvd.basics import init as _init
from allstep.hvd.basics import shutdown as _shutdown
from allstep.hvd.elastic import ObjectState, State
from allstep.hvd.elastic import run_fn as _run_fn
from allstep.hvd.objects import broadcast_object
from allstep.hvd.place import rank
from allstep.keras.before_training import is_built
from allstep.keras.callbacks.broadcast_variables import broadcast_model
from allstep.keras.framework_arrays import to_array

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function `func(state, ...)`, so that it survives changes of the world.

    It starts with rank 0's state on all ranks, and starts again after the world has changed.
    """
    return _run_fn(func, _reset)


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
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
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
            variable.assign(saved)
        super().restore()

    def sync(self) -> None:
        """Take over rank 0's values, and save them. A collective."""
        _take_from_step(self.model)
        broadcast_model(self.model, self.optimizer, root_rank=0)
        super().sync()

    def _save_model(self) -> None:
        _take_from_step(self.model)
        self._saved_variables = [to_array(variable) for variable in self._variables()]

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]


# Keras has no type annotations.
class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state after a number of batches, and at the end of each epoch.

    `state`: the state to commit. `batches_per_commit`: default: 1; more lose more work but cost
    less time.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count from the beginning."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


# Keras has no type annotations.
class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of the batch in `state.batch`, 0 at the end of an epoch.

    After a reset it lowers the number of steps that Keras shows for the first epoch by the batches
    that are done. Put it before CommitStateCallback.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the number of steps of this training."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Lower the number of steps by the batches that are done."""
        if not self.params.get("steps"):
            return
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self.params["steps"]
        self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin again at 0."""
        self.state.batch = 0


# Keras has no type annotations.
class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of epochs that are done in `state.epoch`, over several trainings.

    Put it before CommitStateCallback.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the number of epochs before this training."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count this epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1


def _take_from_step(model: Any) -> None:
    """Bring the values of the variables back from the step: on JAX `fit` keeps them elsewhere."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


def _reset() -> None:
    _shutdown()
    _init()
