"""DistributedGradientTape: a tf.GradientTape whose `gradient` returns reduced gradients.

    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss, model.trainable_variables)

All gradients are reduced in one call. They are marked: an optimizer of ours does not reduce them
again.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from allstep.hvd.process_sets import ProcessSet, global_process_set
from allstep.hvd.requests import Average
from allstep.tensorflow.calls import unconverted
from allstep.tensorflow.compression import Compression
from allstep.tensorflow.gradients import Reduction


@unconverted
def DistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape with what `gradtape` has recorded, of a subclass of its class.

    - `sparse_as_dense`: whether IndexedSlices become dense tensors before the reduction.
    - `gradient_predivide_factor`: for op=Average, the gradients are divided by it before the sum
      and by ranks / factor after it.
    - `num_groups`, `groups`: checked and not used, since all gradients are one group here.
    - `device_dense`, `device_sparse`: not used; collectives work in the host's memory.
    - `scale_local_gradients`: whether gradients of local sources are divided by the ranks.
    """
    check_groups(groups, num_groups)
    kind = type(gradtape)
    if isinstance(gradtape, _DistributedGradientTape):
        raise ValueError(
            f"this {kind.__name__} is a distributed tape already: call"
            " hvd.DistributedGradientTape once"
        )
    made: Any = type(kind.__name__, (_DistributedGradientTape, kind), {})
    tape = made.__new__(made)
    tape.__dict__.update(gradtape.__dict__)
    tape._reduction = Reduction(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        process_set,
        scale_local_gradients,
    )
    tape._local_sources = set()
    return tape


@unconverted
def PartialDistributedGradientTape(  # noqa: N802
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a DistributedGradientTape that does not reduce the gradients of some layers.

    `local_layers`: a layer or a list of layers whose weights differ between the ranks.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in _layers(local_layers):
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


class _DistributedGradientTape:
    """What the class of a distributed tape adds to the class of the tape."""

    _reduction: Reduction
    _local_sources: set[int]

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of this variable."""
        self._local_sources.add(identity(source))

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the reduced gradients, in the order of `sources`.

        `use_generic_names`: Horovod's; not used, since gradients are always known by number: the
        names of variables may differ between the ranks.
        """
        owners = tf.nest.flatten(sources)
        grads = super().gradient(target, owners, output_gradients)  # type: ignore[misc]
        return tf.nest.pack_sequence_as(sources, self._reduced(owners, grads))

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Return two lists of (source, gradient): of local sources, and of all others.

        The gradients and arguments are those of `gradient`.
        """
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(grads), strict=True))
        local = [pair for pair in pairs if identity(pair[0]) in self._local_sources]
        others = [pair for pair in pairs if identity(pair[0]) not in self._local_sources]
        return local, others

    def _reduced(self, sources: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        is_local = [identity(source) in self._local_sources for source in sources]
        return self._reduction.of_list(grads, is_local, "DistributedGradientTape")


def check_groups(groups: Any, num_groups: int = 0) -> None:
    """Raise ValueError unless `groups` is a number of groups or a list of lists of variables."""
    if num_groups:
        warnings.warn(
            "num_groups is deprecated: all gradients are reduced as one group",
            DeprecationWarning,
            stacklevel=3,
        )
    if groups is None or (isinstance(groups, list) and all(isinstance(g, list) for g in groups)):
        return
    if not isinstance(groups, int) or groups < 0:
        raise ValueError(
            f"groups={groups!r}: expected a number of groups from 1, or a list of lists of"
            " variables"
        )


def identity(variable: Any) -> int:
    """Return a number by which a variable is known; that of Keras's variable and its own agree."""
    return id(
        variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)
    )


def _layers(layers: Any) -> Iterable[Any]:
    """Return the layers as a list; raise ValueError for anything else than layers."""
    found = [] if layers is None else tf.nest.flatten(layers)
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(
                f"local_layers: expected Keras layers, found {type(layer).__name__} {layer!r}"
            )
    return found
