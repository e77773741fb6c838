"""How the modules of this package get their names from allstep's front-ends."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from allstep.hvd.frameworks import KERAS, KERAS_2, Framework, require


def fill(names: dict[str, Any], front_end: str, *frameworks: Framework) -> list[str]:
    """Copy the public names of a front-end into a module; return them, for its `__all__`.

    names: globals of the module. front_end: module of allstep. frameworks: those that it needs; if
    one is not installed, ImportError names the package to install.
    """
    require(names["__name__"], *frameworks)
    module = import_module(front_end)
    names.update({name: getattr(module, name) for name in module.__all__})
    return list(module.__all__)


def tensorflows_keras(module: str = "") -> str:
    """Return allstep's front-end for the Keras that TensorFlow uses, or a `module` of it."""
    is_separate = find_spec("allstep.tensorflow.keras") is not None
    front_end = "allstep.tensorflow.keras" if is_separate else "allstep.keras"
    return f"{front_end}.{module}" if module else front_end


def framework_of_tensorflows_keras() -> Framework:
    """Return which Keras `tf.keras` is: Keras 2 with TF_USE_LEGACY_KERAS=1, else Keras 3."""
    is_legacy = os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    return KERAS_2 if is_legacy else KERAS
