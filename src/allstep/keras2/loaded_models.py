"""`load_model` of Keras 2: a saved model, with its optimizer distributed."""

from collections.abc import Sequence
from typing import Any

import tf_keras

from allstep.keras2.adopted_models import adopt
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
    - `legacy_opts`: accepted as in Horovod; the file names the kind of its optimizer.
    """
    known = {each.__name__: each for each in custom_optimizers or ()}
    model = tf_keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        made = made_distributed(model.optimizer, compression)
        model.optimizer = made
        if hasattr(model, "_compile_config"):
            model._compile_config.config["optimizer"] = made
        adopt(model)
    return model
