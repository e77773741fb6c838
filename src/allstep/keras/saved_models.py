"""`load_model`: a saved model, with its optimizer distributed."""

from collections.abc import Sequence
from typing import Any

import keras

from allstep.keras.compiled_models import adopt
from allstep.keras_shared.wrapped_optimizers import made_distributed
from allstep.torch.compression import Compression


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a saved model whose optimizer is distributed and has its saved state.

    - `custom_optimizers`: classes of optimizers that are not Keras's own.
    - `custom_objects`: other classes and functions of the model, by name.
    - `compression`: as for `DistributedOptimizer`.
    - `legacy_opts`: accepted as in Horovod; Keras 3 has no legacy optimizers.
    """
    known = {each.__name__: each for each in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        _distribute(model, made_distributed(model.optimizer, compression))
    return model


def _distribute(model: Any, optimizer: Any) -> None:
    """Exchange the optimizer of a compiled model, also in what is saved with it."""
    model.optimizer = optimizer
    model._compile_config.config["optimizer"] = optimizer
    # Whether the saved model was compiled by XLA does not matter for this process.
    adopt(model, is_auto=True)
