"""Elastic training with Keras 2: `hvd.elastic.run`, `KerasState` and the callbacks that update it.

`allstep.hvd.elastic` explains how it works; `allstep.keras.elastic` shows a training.
"""

from typing import Any

import tf_keras

from allstep.keras2 import dialect
from allstep.keras_shared.before_training import is_built
from allstep.keras_shared.elastic_callbacks import CommitState, UpdateBatchState, UpdateEpochState
from allstep.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """The state of a Keras 2 training: the variables of a model and of its optimizer.

    `model`: a model that has its weights. `optimizer`: default: that of the model. `kwargs`:
    further values, such as epoch and batch; each becomes an attribute.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        found = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if found is None or not is_built(model):
            raise ValueError(
                f"KerasState: {model.name} has no weights or no optimizer yet: give it an Input or"
                " call model.build(input_shape), and call model.compile(...), before"
            )
        dialect.build_optimizer(found, model.trainable_variables)
        super().__init__(model, found, **kwargs)


# Keras has no type annotations.
class CommitStateCallback(CommitState, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = CommitState.__doc__


class UpdateBatchStateCallback(UpdateBatchState, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = UpdateBatchState.__doc__


class UpdateEpochStateCallback(UpdateEpochState, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = UpdateEpochState.__doc__
