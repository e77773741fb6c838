"""Horovod's callbacks for `model.fit`, with its arguments, on torch, TensorFlow and JAX.

    model.fit(data, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size()),
    ])

`keras_shared.before_training` describes what the ranks compare before the first step. None of them
has a method for the end of a batch: Keras would then run every callback in step with the model, on
torch and JAX.
"""

import keras

from allstep.keras import dialect
from allstep.keras_shared.best_checkpoint import BestCheckpoint
from allstep.keras_shared.broadcast_callback import BroadcastGlobalVariables
from allstep.keras_shared.learning_rates import LearningRateSchedule, LearningRateWarmup
from allstep.keras_shared.metric_means import MetricAverage

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


# Keras has no type annotations.
class BroadcastGlobalVariablesCallback(BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = BroadcastGlobalVariables.__doc__
    _keras = dialect


class MetricAverageCallback(MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = MetricAverage.__doc__
    _keras = dialect


class LearningRateScheduleCallback(LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = LearningRateSchedule.__doc__
    _keras = dialect


class LearningRateWarmupCallback(LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = LearningRateWarmup.__doc__
    _keras = dialect


class BestModelCheckpoint(BestCheckpoint, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    __doc__ = BestCheckpoint.__doc__
    _keras = dialect
