"""Small Keras trainings for tests of `allstep.keras`, in float64, with smooth activations.

Inside a rank only: Keras and its backend are imported by the functions. Blank inputs on the corner
of ReLU would let the last bit decide, so there is none here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

SAMPLES, BATCH, EPOCHS = 48, 12, 2


def data() -> tuple[Any, Any]:
    """All samples: inputs and targets."""
    numbers = np.random.default_rng(7)
    x = numbers.normal(size=(SAMPLES, 5))
    return x, np.sin(x @ numbers.normal(size=(5, 2)))


def share(array: Any, rank: int, size: int) -> Any:
    """This rank's part of every global batch, in order."""
    batches = array.reshape(SAMPLES // BATCH, BATCH, *array.shape[1:])
    return np.concatenate(
        [batch[rank * BATCH // size : (rank + 1) * BATCH // size] for batch in batches]
    )


def prepare() -> None:
    """Set Keras to float64, also where it computes in float32 (all backends but TensorFlow)."""
    import keras
    from keras.src.backend.common import dtypes

    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")


def model() -> Any:
    """A model with the same weights in all processes."""
    import keras

    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(7, activation="tanh"),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


def weights(trained: Any) -> list[Any]:
    """All weights as numpy arrays."""
    return [np.array(each) for each in trained.get_weights()]


def train(optimizer: Any, rank: int, size: int, **options: Any) -> tuple[list[float], list[Any]]:
    """Train on this rank's share; return the losses of the epochs and the weights."""
    made = model()
    made.compile(optimizer=optimizer, loss="mse", **options)
    x, y = (share(each, rank, size) for each in data())
    history = made.fit(x, y, batch_size=BATCH // size, epochs=EPOCHS, shuffle=False, verbose=0)
    return history.history["loss"], weights(made)


def plain_optimizers() -> dict[str, Callable[[], Any]]:
    """The optimizers to compare one worker and several with, by name."""
    from keras import optimizers as known

    return {
        "momentum": lambda: known.SGD(0.05, momentum=0.9),
        "adam": lambda: known.Adam(0.01),
        "decay": lambda: known.AdamW(0.01, weight_decay=0.1),
        "adam, clipped": lambda: known.Adam(0.01, global_clipnorm=0.1),
        "clip by norm": lambda: known.SGD(0.5, clipnorm=0.1),
        "ema": lambda: known.SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        "accumulation": lambda: known.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
        "decay, clipped, schedule": lambda: known.AdamW(
            known.schedules.ExponentialDecay(0.01, 2, 0.5), weight_decay=0.1, clipnorm=0.1
        ),
        "schedule": lambda: known.SGD(known.schedules.ExponentialDecay(0.05, 2, 0.9)),
    }
