"""Which front-end serves the Keras that TensorFlow uses in this process."""

import importlib
import os
from typing import Any

VARIABLE = "TF_USE_LEGACY_KERAS"


def uses_keras_2() -> bool:
    """Return whether `tf.keras` is Keras 2: TensorFlow reads this variable when it is imported."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true")


def load() -> Any:
    """Return the front-end; raise ImportError if Keras 3 is on another backend than TensorFlow."""
    if uses_keras_2():
        return importlib.import_module("allstep.keras2")
    module = importlib.import_module("allstep.keras")
    backend = importlib.import_module("keras").backend.backend()
    if backend != "tensorflow":
        raise ImportError(
            f"allstep.tensorflow.keras found the Keras backend {backend!r}: write `import"
            " allstep.keras as hvd` (horovod.keras), or set KERAS_BACKEND=tensorflow",
            name="allstep.tensorflow.keras",
        )
    return module
