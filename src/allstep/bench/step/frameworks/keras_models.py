"""The models of `bench step --framework` in Keras, with the same weights in every process.

| name | parameters | gradients |
|---|---|---|
| cnn | two convolutions and two dense layers, 0.4M | 8 |
| resnet18 | as in arXiv 1512.03385, with a first convolution of 3x3, 11.2M | 62 |
| dense | four dense layers, 58M | 8 |
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import layers

from allstep.bench.step.frameworks.tasks import TASKS


def make_model(name: str) -> Any:
    """Return a new model, always with the same weights."""
    keras.utils.set_random_seed(0)
    images = keras.Input(TASKS[name].shape)
    return keras.Model(images, _BODIES[name](images))


def make_sgd() -> Any:
    """Return a new optimizer. With a low learning rate rounding differences grow slowly."""
    return keras.optimizers.SGD(learning_rate=0.001, momentum=0.9)


def loss() -> Any:
    """Return the loss of all models, whose outputs are logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _cnn(x: Any) -> Any:
    for width in (32, 64):
        x = layers.Conv2D(width, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu")(layers.Flatten()(x))
    return layers.Dense(10)(x)


def _dense(x: Any) -> Any:
    x = layers.Flatten()(x)
    for width in (4096, 8192, 2304):
        x = layers.Dense(width, activation="relu")(x)
    return layers.Dense(1000)(x)


def _resnet18(x: Any) -> Any:
    x = layers.ReLU()(_convolution(x, 64, 3, 1))
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = _block(_block(x, width, stride), width, 1)
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def _block(x: Any, width: int, stride: int) -> Any:
    """Return two convolutions with a shortcut around them."""
    shortcut = x if stride == 1 and x.shape[-1] == width else _convolution(x, width, 1, stride)
    x = layers.ReLU()(_convolution(x, width, 3, stride))
    return layers.ReLU()(layers.Add()([_convolution(x, width, 3, 1), shortcut]))


def _convolution(x: Any, width: int, side: int, stride: int) -> Any:
    x = layers.Conv2D(width, side, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


_BODIES: Mapping[str, Callable[[Any], Any]] = {
    "cnn": _cnn,
    "resnet18": _resnet18,
    "dense": _dense,
}
