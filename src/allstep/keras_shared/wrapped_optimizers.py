"""Horovod's functions that wrap an optimizer, for both Kerases, and the parts of a wrapped one.

The object decides (D21): an optimizer of Keras 2 is wrapped by `allstep.keras2.optimizer`, one of
Keras 3 by `allstep.keras.optimizer`. These are layers above, imported when the first of their
optimizers comes.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from allstep.hvd.place import running
from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import Average
from allstep.keras_shared.gradient_reduction import Reduction, Settings
from allstep.keras_shared.optimizer_arguments import (
    check_groups,
    checked_layers,
    checked_op,
    checked_passes,
    compressor,
)
from allstep.keras_shared.which_keras import front_end_of
from allstep.torch.compression import Compression


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer like `optimizer` that applies the gradients of all ranks.

    - `name`, `device_dense`, `device_sparse`: accepted as in Horovod, without effect.
    - `compression`: the compressor for gradients while they are sent. Default: none.
    - `sparse_as_dense`: reduce IndexedSlices as dense gradients. Default: gather their rows.
    - `gradient_predivide_factor`: accepted with op=Average; here the whole division of an average
      happens before the sum, so nothing overflows.
    - `op`: Average (default) or Sum.
    - `backward_passes_per_step`: calls whose gradients are added on each rank before they are
      reduced and applied. Default: 1.
    - `average_aggregated_gradients`: divide these sums by the number of calls.
    - `num_groups`, `groups`: Horovod's options for which gradients are reduced together. They are
      checked; here all gradients are always reduced together.
    - `process_set`: the ranks whose gradients are reduced. Default: all ranks.
    - `scale_local_gradients`: divide the gradients of local variables (see `register_local_var`)
      by the number of ranks.

    An optimizer that has state keeps it.
    """
    running()
    check_groups(num_groups, groups)
    settings = Settings(
        op=checked_op(op, gradient_predivide_factor),
        **compressor(compression),
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        passes=checked_passes(backward_passes_per_step),
        averages_passes=average_aggregated_gradients,
        scales_local=scale_local_gradients,
    )
    made: Any = _wrapper_of(optimizer)(optimizer, settings)
    return made


def PartialDistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: int | Sequence[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a distributed optimizer that does not reduce the gradients of `local_layers`.

    `local_layers`: a layer or a list of layers. The other arguments are those of
    `DistributedOptimizer`.
    """
    made = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    made._local.layers.extend(checked_layers(local_layers, made._layer_class))
    return made


def made_distributed(optimizer: Any, compression: Any) -> Any:
    """Return the optimizer of a loaded model, distributed.

    One that is distributed stays as it is: the script has given `load_model` a function that makes
    such optimizers, in `custom_objects`.
    """
    is_made = isinstance(getattr(optimizer, "_settings", None), Settings)
    return optimizer if is_made else DistributedOptimizer(optimizer, compression=compression)


def _wrapper_of(optimizer: Any) -> Callable[[Any, Settings], Any]:
    """Return the function `distributed(optimizer, settings)` for the Keras of an optimizer."""
    module = importlib.import_module(f"{front_end_of(optimizer).__name__}.optimizer")
    wrapper: Callable[[Any, Settings], Any] = module.distributed
    return wrapper


# The parts of a wrapped optimizer


class LocalVariables:
    """The variables whose gradients are not reduced. `layers`: their weights are such variables."""

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self.layers: list[Any] = []

    def keys(self, key: Callable[[Any], Any]) -> set[Any]:
        """Return the optimizer's keys of all local variables."""
        of_layers = [weight for layer in self.layers for weight in layer.trainable_weights]
        return {key(variable) for variable in [*self.variables, *of_layers]}


class Passes(int):
    """A number of passes; Horovod's is a variable of TensorFlow, with `numpy()`."""

    def numpy(self) -> int:
        """Return it as a plain number."""
        return int(self)


class AggregationHelper:
    """Horovod's name for the number of gradients that are accumulated at the moment."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    @property
    def counter(self) -> Passes:
        """The number of passes since the last update."""
        return Passes(self._reduction.counter)
