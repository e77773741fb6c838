"""How the modules of this package get their names from allstep's front-ends."""

import os
import sys
from importlib import import_module
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


def uses_keras_2() -> bool:
    """Return whether `tf.keras` is Keras 2 in this process."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def plain_keras() -> str:
    """Return allstep's front-end for `horovod.keras`.

    A script may use Keras 3 although `tf.keras` is Keras 2: it has imported `keras` then.
    """
    return "allstep.keras2" if uses_keras_2() and "keras" not in sys.modules else "allstep.keras"


def framework_of_tensorflows_keras() -> Framework:
    """Return which Keras `tf.keras` is: Keras 2 with TF_USE_LEGACY_KERAS=1, else Keras 3."""
    return KERAS_2 if uses_keras_2() else KERAS
