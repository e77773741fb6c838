"""Which Keras an object belongs to (D21): its class decides, not the module that was imported.

With TF_USE_LEGACY_KERAS=1 `tf.keras` is Keras 2 while `import keras` is still Keras 3, so both can
be in one process. A front-end that gets an object of the other Keras calls the other front-end.
"""

import importlib
from typing import Any

KERAS_2 = "tf_keras"
"""The package of Keras 2."""


def is_keras_2(thing: Any) -> bool:
    """Return whether an optimizer, model, layer or callback is one of Keras 2."""
    return any(each.__module__.split(".")[0] == KERAS_2 for each in type(thing).__mro__)


def front_end_of(thing: Any) -> Any:
    """Return the front-end for the Keras of an object; import it if this is its first use."""
    return importlib.import_module("allstep.keras2" if is_keras_2(thing) else "allstep.keras")
