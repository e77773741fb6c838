"""TensorFlow: a tf.function with a plain tape, and with `DistributedGradientTape`.

The model and the optimizer are Keras's, the loop is the script's own.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import allstep.tensorflow as hvd
from allstep.bench.step.frameworks.keras_models import loss, make_model, make_sgd
from allstep.bench.step.frameworks.keras_trainees import start
from allstep.bench.step.frameworks.tasks import BRIDGE, TAPE
from allstep.bench.step.frameworks.trainee import Contenders, Trainee
from allstep.bench.step.result import ALONE


class TapeTrainee(Trainee):
    """A model with a train step of its own. `wrap`: makes another tape of the plain one."""

    def __init__(self, name: str, wrap: Callable[[Any], Any]) -> None:
        model, optimizer, loss_of = make_model(name), make_sgd(), loss()
        variables = model.trainable_variables
        optimizer.build(variables)

        def step(images: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss_of(labels, model(images, training=True))
            grads = wrap(tape).gradient(value, variables)
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            return value

        self._step = tf.function(step)

    def start(self) -> None:
        """Do nothing."""

    def step(self, images: Any, labels: Any) -> Any:
        """Run one training step and return the loss."""
        return self._step(images, labels)

    def finish(self) -> None:
        """Do nothing: a step has ended when its function returns."""


def contenders(model: str, rank: int, size: int) -> Contenders:
    """Return what this worker trains, by the names of the rows."""
    own_set = start(hvd, rank, size)
    distributed = hvd.DistributedGradientTape
    return {
        ALONE: lambda: TapeTrainee(model, lambda tape: tape),
        TAPE: lambda: TapeTrainee(model, distributed),
        BRIDGE: lambda: TapeTrainee(model, lambda tape: distributed(tape, process_set=own_set)),
    }
