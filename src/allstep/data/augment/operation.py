"""The interface of an operation on images.

```
draw(draws, stream)    -> table (n, k)     parameters from random numbers, once per batch
one(image, row)        -> image            one image (height, width, channels) and its table row
many(images, table)    -> images | None    n small images of one shape; None: use `one` instead
```

An image is uint8. The operation owns it and may change it in place and return it. `many` returns
the same bits as `one`.
"""

import operator
from collections.abc import Iterable
from typing import Any

from allstep.data.image.limit import MAX_PIXELS
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError, cut


class Operation:
    """One step of a transform; the base class returns each image unchanged."""

    num_draws = 0
    """Number of uniform random numbers that a sample needs."""
    releases_gil = True
    """Whether other Python threads can run during the operation."""

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Return the parameters of a batch, one row per sample.

        The default is `num_draws` uniform numbers per sample; subclasses convert them to
        parameters.
        """
        return draws.uniform(stream, self.num_draws)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Return the image after this step; `row` is this sample's row of the table from `draw`."""
        return image

    def many(self, images: Pixels, table: Floats) -> Pixels | None:
        """Return n images (n, height, width, channels) after this step.

        `table` holds one row per image. Return None where there is no faster way than `one` per
        image.
        """
        return None

    def resizes(self) -> tuple[int, int] | None:
        """Return (height, width) of the output, or None if the operation keeps the size."""
        return None

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())
        return f"{type(self).__name__}({arguments})"

    def _arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments for `repr`; the default is all public attributes."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class InPlace(Operation):
    """An operation that changes an image in place.

    Small images, too, are changed one after the other.
    """

    def many(self, images: Pixels, table: Floats) -> Pixels | None:
        """Call `one` on each image in place; this skips the other per-image work of a transform."""
        for image, row in zip(images, table, strict=True):
            self.one(image, row)
        return images


def check_share(what: str, value: float) -> float:
    """Return `value` as a float; raise ConfigError unless it is from 0 to 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{what} is a share from 0 to 1, not {value}")
    return float(value)


def check_range(
    what: str, pair: tuple[float, float], low: float, high: float
) -> tuple[float, float]:
    """Return `pair` as floats; raise ConfigError unless `low` <= first <= second <= `high`."""
    try:
        first, second = (float(value) for value in pair)
    except (TypeError, ValueError):
        raise ConfigError(f"{what} is a pair (smallest, largest), not {pair!r}") from None
    if not low <= first <= second <= high:
        raise ConfigError(
            f"{what} must be (smallest, largest) within {low} and {high}, not {pair!r}"
        )
    return first, second


def check_whole(what: str, value: int, low: int, high: int) -> int:
    """Return `value` as an int; raise ConfigError unless it is from `low` to `high`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise ConfigError(f"{what} is a whole number from {low} to {high}, not {cut(repr(value))}")
    return number


def check_size(what: str, size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of a size given as one number or as a pair."""
    sides = size if isinstance(size, Iterable) else (size, size)
    try:
        height, width = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        found = cut(repr(size))
        raise ConfigError(f"{what} is a number of pixels, or (height, width), not {found}")
    if height * width > MAX_PIXELS:
        found = cut(repr(size))
        raise ConfigError(f"{what}: expected at most {MAX_PIXELS:,} pixels in all, found {found}")
    return height, width
