"""The parts that callbacks share: XLA switched off, and the comparison before the first step.

The classes of this package have no base of Keras. A front-end combines them with the Callback of
its Keras and sets `_keras`, the module with what the two Kerases do differently; see `Dialect`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from allstep.keras_shared.before_training import Training, compare_once, register


class Dialect(Protocol):
    """What is written differently in Keras 3 and Keras 2; `allstep.keras.dialect` is one."""

    def is_variable(self, thing: Any) -> bool:
        """Return whether this is a variable of this Keras."""

    def to_array(self, value: Any) -> Any:
        """Return a copy of a variable, tensor or number as a numpy array."""

    def check_exact(self, what: str) -> None:
        """Raise ValueError where `what`, hvd.batches or hvd.evaluate, does not work."""

    def as_array(self, value: Any) -> Any:
        """Return a numpy array with the values of a tensor or array, without a copy if it can."""

    def floatx(self) -> str:
        """Return the name of the type that Keras computes in."""

    def assign(self, variable: Any, array: Any) -> None:
        """Give a variable the values of a numpy array."""

    def aggregation(self, variable: Any) -> str:
        """Return how replicas of a metric's variable are combined: "sum", "mean", ..."""

    def in_order(self, model: Any, logs: dict[str, Any]) -> Any:
        """Return the results of metrics as `model.evaluate` does: a list, or one number."""

    def switch_xla_off(self, model: Any) -> None:
        """Switch XLA off for a model that calls us from a graph of TensorFlow."""

    def build_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Create the variables of an optimizer, if it has none yet."""

    def optimizer_variables(self, optimizer: Any) -> list[Any]:
        """Return the variables of an optimizer."""

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Copy the values of a rank into these variables on all ranks."""

    def scale(self, variable: Any, factor: float) -> None:
        """Multiply a variable by a number."""

    def velocities(self, optimizer: Any) -> list[Any]:
        """Return the variables that contain past learning rates: those of SGD and RMSprop."""


class WithoutXLA:
    """A callback that switches XLA off on TensorFlow, before Keras makes its train function."""

    _keras: Dialect
    model: Any
    params: Any

    def set_model(self, model: Any) -> None:
        """Take the model of a `fit`."""
        super().set_model(model)  # type: ignore[misc]
        self._keras.switch_xla_off(model)


class Collective(WithoutXLA):
    """A callback that communicates, so all ranks must have it.

    The first of them in a `fit` compares the ranks at the beginning of training.
    """

    trainings: list[Training]

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the parameters of a `fit`, a dict that all its callbacks share."""
        super().set_params(params)  # type: ignore[misc]
        register(params, type(self).__name__)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compare the ranks, unless another callback did."""
        # A list of callbacks that a script made itself may have no parameters.
        params = {} if self.params is None else self.params
        self.trainings = compare_once(self.model, params)
