"""The part that our callbacks share: the comparison of the ranks before the first step."""

from typing import Any

import keras

from allstep.keras.before_training import Training, compare_once, register, without_xla


# Keras has no type annotations.
class WithoutXLA(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that switches XLA off on TensorFlow, before Keras makes its train function."""

    def set_model(self, model: Any) -> None:
        """Take the model of a `fit`."""
        super().set_model(model)
        without_xla(model)


class Collective(WithoutXLA):
    """A callback that communicates, so all ranks must have it.

    The first of them in a `fit` compares the ranks at the beginning of training.
    """

    trainings: list[Training]

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the parameters of a `fit`, a dict that all its callbacks share."""
        super().set_params(params)
        register(params, type(self).__name__)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compare the ranks, unless another callback did."""
        # A list of callbacks that a script made itself may have no parameters.
        params = {} if self.params is None else self.params
        self.trainings = compare_once(self.model, params)
