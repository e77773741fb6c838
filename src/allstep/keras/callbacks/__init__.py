"""Horovod's callbacks for `model.fit`, with its arguments, on torch, TensorFlow and JAX.

    model.fit(data, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size()),
    ])

`before_training` describes what the ranks compare before the first step. None of them has a method
for the end of a batch: Keras would then run every callback in step with the model, on torch and
JAX.
"""

from allstep.keras.callbacks.broadcast_variables import BroadcastGlobalVariablesCallback
from allstep.keras.callbacks.checkpoint import BestModelCheckpoint
from allstep.keras.callbacks.learning_rate_callbacks import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from allstep.keras.callbacks.metrics import MetricAverageCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
