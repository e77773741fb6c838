"""Keras 3 on any backend: `train_on_batch` with a plain and with a distributed optimizer.

`train_on_batch` runs the train function that `compile` selects (compiled on TensorFlow and JAX), as
in the independent copies. Its loss is the mean over the steps of the turn, since Keras keeps it in
a metric.
"""

from typing import Any

import keras

import allstep.keras as hvd
from allstep.bench.step.frameworks.keras_models import loss, make_model, make_sgd
from allstep.bench.step.frameworks.tasks import BRIDGE
from allstep.bench.step.frameworks.trainee import Contenders, Trainee
from allstep.bench.step.result import ALONE, OPTIMIZER


class KerasTrainee(Trainee):
    """A compiled model."""

    def __init__(self, model: str, optimizer: Any) -> None:
        self._model = make_model(model)
        self._model.compile(optimizer=optimizer, loss=loss())

    def start(self) -> None:
        """Begin a new mean of the losses."""
        self._model.reset_metrics()

    def step(self, images: Any, labels: Any) -> Any:
        """Run one training step and return the mean loss of the turn so far."""
        return self._model.train_on_batch(images, labels)

    def finish(self) -> None:
        """Wait for JAX, which updates weights after `train_on_batch` has returned the loss."""
        if keras.backend.backend() == "jax":
            for variable in self._model.trainable_variables:
                variable.value.block_until_ready()


def contenders(model: str, rank: int, size: int) -> Contenders:
    """Return what this worker trains, by the names of the rows."""
    own_set = start(hvd, rank, size)

    def distributed(**named: Any) -> Trainee:
        return KerasTrainee(model, hvd.DistributedOptimizer(make_sgd(), **named))

    return {
        ALONE: lambda: KerasTrainee(model, make_sgd()),
        OPTIMIZER: distributed,
        BRIDGE: lambda: distributed(process_set=own_set),
    }


def start(front_end: Any, rank: int, size: int) -> Any:
    """Start a front-end and return a process set of this rank alone.

    With that set gradients cross the bridge and stay as they are. All ranks register the sets of
    all ranks.
    """
    if size == 1:
        front_end.init()
        return front_end.global_process_set
    sets = [front_end.ProcessSet([each]) for each in range(size)]
    front_end.init(process_sets=sets)
    return sets[rank]
