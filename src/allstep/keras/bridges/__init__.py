"""The way of the gradients out of a Keras backend and back: one module per backend.

| backend | how | results |
|---|---|---|
| torch | the gradients are torch tensors | in place, in `p.grad` |
| TensorFlow | one `tf.py_function` for the whole list, DLPack views | in memory of our own |
| JAX | one XLA FFI call inside `jit` | in place, in memory that XLA aliased |

Each module has the same names: `IN_PLACE`, whether a reduction may write to the gradients, and
`reduce(reduction, grads, variables)`, which returns whether to update the variables now (a tensor
of the backend where this is known only when the graph runs) and the reduced gradients; `variables`
are those of the gradients, in the same order. `conditional(flag, update, skip)` calls one of two
functions by such a flag. `wait()` and `forget_error()` are for the
end of `fit`: JAX runs steps later than it returns.
"""

import importlib
from typing import Any

import keras

from allstep.errors import UserError

_BACKENDS = {
    "torch": "allstep.keras.bridges.torch_bridge",
    # Keras 2 has the same one.
    "tensorflow": "allstep.keras_shared.tensorflow_bridge",
    "jax": "allstep.keras.bridges.jax_bridge",
}


def bridge() -> Any:
    """Return the module for the backend that Keras uses in this process."""
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise UserError(
            f"the Keras backend {backend!r} cannot train: set KERAS_BACKEND to one of"
            f" {', '.join(_BACKENDS)}"
        )
    return importlib.import_module(_BACKENDS[backend])
