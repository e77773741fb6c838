"""The callback that makes all ranks begin with the weights of one rank.

Horovod broadcasts at the end of the first batch, because Keras 2 creates the variables of an
optimizer there. The first step then mixes gradients of different weights. Here the broadcast
precedes the first step wherever all layers have their weights by then: always on torch and JAX,
where `fit` builds the model; on TensorFlow and in Keras 2 for a model with an `Input`. Otherwise it
comes at the end of the first batch, too.

The state of random generators (dropout) is not sent, so ranks draw different numbers.
"""

from collections.abc import Sequence
from typing import Any

from allstep import faults
from allstep.keras_shared.before_training import is_built
from allstep.keras_shared.collective_callbacks import Collective, Dialect


class BroadcastGlobalVariables(Collective):
    """Copies the weights and the optimizer's state of one rank to all ranks, once per object.

    `root_rank`: the rank whose values are sent. `device`: not used; Horovod's signature.
    `local_variables`: variables, or one of them, that keep the values of their rank (default:
    none).
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self.local_variables: list[Any] = []
        given = () if local_variables is None else local_variables
        # Not by its truth: a variable has none.
        for each in [given] if self._keras.is_variable(given) else given:
            self.register_local_var(each)

    def register_local_var(self, var: Any) -> None:
        """Let a variable keep the values of its rank. Raise ValueError for anything else."""
        if not self._keras.is_variable(var):
            raise ValueError(
                f"local_variables: {type(var).__name__} is not a Keras variable; give a list"
                " such as layer.variables"
            )
        self.local_variables.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast now if all ranks have all weights, else after the first batch."""
        super().on_train_begin(logs)
        if self.broadcast_done:
            return
        if all(training.weights is not None for training in self.trainings):
            self._broadcast()
        else:
            # A method of the class would make Keras run all callbacks of all trainings in step
            # with the model, on torch and JAX, where this is never needed.
            self.on_train_batch_end = self._after_batch

    def _after_batch(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        broadcast_model(self._keras, model, model.optimizer, self.root_rank, self.local_variables)
        self.broadcast_done = True


def broadcast_model(
    dialect: Dialect,
    model: Any,
    optimizer: Any,
    root_rank: int,
    local_variables: Sequence[Any] = (),
) -> None:
    """Copy the weights of a model and the state of its optimizer from one rank to all ranks."""
    if not is_built(model):
        raise ValueError(
            f"{model.name} has no weights yet, so they cannot be sent: give it an Input, or call"
            " model.build(input_shape)"
        )
    dialect.build_optimizer(optimizer, model.trainable_variables)
    local = {id(each) for each in local_variables}
    sent = [*model.weights, *dialect.optimizer_variables(optimizer)]
    if faults.active is not None:
        faults.active.in_phase("broadcast")
    dialect.broadcast([each for each in sent if id(each) not in local], root_rank)
