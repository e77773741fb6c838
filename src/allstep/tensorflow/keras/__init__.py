"""Horovod's API for the Keras that TensorFlow uses: `import allstep.tensorflow.keras as hvd`.

It is `allstep.keras` (Keras 3 on TensorFlow) or, with TF_USE_LEGACY_KERAS=1, `allstep.keras2`
(Keras 2), under one name: the same objects. These are layers above this one, so they are imported
by name, when a script asks for them. Keras 3 on another backend is refused: its models are not
TensorFlow's.
"""

import sys
from typing import Any

from allstep.tensorflow.keras.front_end import load

_module = load()
__all__: list[str] = list(_module.__all__)
# For `from allstep.tensorflow.keras import *`, and for tools that read the names of a module.
globals().update({name: getattr(_module, name) for name in __all__})
# `import allstep.tensorflow.keras.callbacks` works as well.
for _name in ("callbacks", "elastic"):
    sys.modules[f"{__name__}.{_name}"] = getattr(_module, _name)


def __getattr__(name: str) -> Any:
    """Return a name that is not listed from the front-end that was chosen."""
    return getattr(_module, name)
