"""Horovod's callbacks for `model.fit` of Keras 2, with its arguments; as in `allstep.keras`."""

import tf_keras

from allstep.keras2 import dialect
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
class BroadcastGlobalVariablesCallback(BroadcastGlobalVariables, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = BroadcastGlobalVariables.__doc__
    _keras = dialect


class MetricAverageCallback(MetricAverage, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = MetricAverage.__doc__
    _keras = dialect


class LearningRateScheduleCallback(LearningRateSchedule, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = LearningRateSchedule.__doc__
    _keras = dialect


class LearningRateWarmupCallback(LearningRateWarmup, tf_keras.callbacks.Callback):  # type: ignore[misc]
    __doc__ = LearningRateWarmup.__doc__
    _keras = dialect


class BestModelCheckpoint(BestCheckpoint, tf_keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    __doc__ = BestCheckpoint.__doc__
    _keras = dialect
