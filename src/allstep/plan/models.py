"""Layers of the models in published measurements: parameters and work of each, from their shapes.

Only what the simulator needs: which layers have how many bytes of gradient, and which share of the
time of a step each may take. The classifier has 1,000 classes; images are 224 x 224, for Inception
299 x 299.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple


class Layer(NamedTuple):
    """A layer with weights."""

    parameters: int
    flop: float
    """Operations for one sample, forward."""


def _conv(inputs: int, outputs: int, kernel: tuple[int, int], size: int) -> Layer:
    """Return a convolution with its batch norm; `size` is the edge of the output."""
    weights = inputs * outputs * kernel[0] * kernel[1]
    return Layer(weights + 2 * outputs, 2.0 * weights * size * size)


def _linear(inputs: int, outputs: int) -> Layer:
    return Layer(inputs * outputs + outputs, 2.0 * inputs * outputs)


def _resnet(blocks: tuple[int, int, int, int]) -> Iterator[Layer]:
    """Yield the layers of a ResNet with bottleneck blocks."""
    yield _conv(3, 64, (7, 7), 112)
    inputs = 64
    for stage, count in enumerate(blocks):
        width, size = 64 << stage, 56 >> stage
        for block in range(count):
            first = size * 2 if block == 0 and stage else size
            yield _conv(inputs, width, (1, 1), first)
            yield _conv(width, width, (3, 3), size)
            yield _conv(width, 4 * width, (1, 1), size)
            if block == 0:
                yield _conv(inputs, 4 * width, (1, 1), size)
            inputs = 4 * width
    yield _linear(2048, 1000)


def _vgg16() -> Iterator[Layer]:
    inputs, size = 3, 224
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layer = _conv(inputs, outputs, (3, 3), size)
            # A bias instead of a norm.
            yield layer._replace(parameters=layer.parameters - outputs)
            inputs = outputs
        size //= 2
    yield _linear(512 * 7 * 7, 4096)
    yield _linear(4096, 4096)
    yield _linear(4096, 1000)


# A branch of an Inception block: (outputs, kernel) of one convolution after the other.
_ONE, _THREE, _FIVE = (1, 1), (3, 3), (5, 5)
_ROW, _COLUMN, _SHORT_ROW, _SHORT_COLUMN = (1, 7), (7, 1), (1, 3), (3, 1)


def _branch(inputs: int, size: int, *steps: tuple[int, tuple[int, int]]) -> Iterator[Layer]:
    for outputs, kernel in steps:
        yield _conv(inputs, outputs, kernel, size)
        inputs = outputs


def _inception_v3() -> Iterator[Layer]:
    yield _conv(3, 32, _THREE, 149)
    yield _conv(32, 32, _THREE, 147)
    yield _conv(32, 64, _THREE, 147)
    yield _conv(64, 80, _ONE, 73)
    yield _conv(80, 192, _THREE, 71)
    for inputs, pooled in ((192, 32), (256, 64), (288, 64)):
        yield from _branch(inputs, 35, (64, _ONE))
        yield from _branch(inputs, 35, (48, _ONE), (64, _FIVE))
        yield from _branch(inputs, 35, (64, _ONE), (96, _THREE), (96, _THREE))
        yield from _branch(inputs, 35, (pooled, _ONE))
    yield _conv(288, 384, _THREE, 17)
    yield from _branch(288, 35, (64, _ONE), (96, _THREE))
    yield _conv(96, 96, _THREE, 17)
    for width in (128, 160, 160, 192):
        yield from _branch(768, 17, (192, _ONE))
        yield from _branch(768, 17, (width, _ONE), (width, _ROW), (192, _COLUMN))
        long = [(width, each) for each in (_ONE, _COLUMN, _ROW, _COLUMN)]
        yield from _branch(768, 17, *long, (192, _ROW))
        yield from _branch(768, 17, (192, _ONE))
    yield from _branch(768, 17, (192, _ONE))
    yield _conv(192, 320, _THREE, 8)
    yield from _branch(768, 17, (192, _ONE), (192, _ROW), (192, _COLUMN))
    yield _conv(192, 192, _THREE, 8)
    for inputs in (1280, 2048):
        yield from _branch(inputs, 8, (320, _ONE))
        yield from _branch(inputs, 8, (384, _ONE), (384, _SHORT_ROW))
        yield _conv(384, 384, _SHORT_COLUMN, 8)
        yield from _branch(inputs, 8, (448, _ONE), (384, _THREE), (384, _SHORT_ROW))
        yield _conv(384, 384, _SHORT_COLUMN, 8)
        yield from _branch(inputs, 8, (192, _ONE))
    yield _linear(2048, 1000)


MODELS: dict[str, Callable[[], Iterator[Layer]]] = {
    "inception_v3": _inception_v3,
    "resnet50": lambda: _resnet((3, 4, 6, 3)),
    "resnet101": lambda: _resnet((3, 4, 23, 3)),
    "resnet152": lambda: _resnet((3, 8, 36, 3)),
    "vgg16": _vgg16,
}


def layers_of(name: str) -> tuple[Layer, ...]:
    """Return the layers of one of `MODELS`, in forward order."""
    return tuple(MODELS[name]())
