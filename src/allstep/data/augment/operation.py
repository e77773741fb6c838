"""What an operation on images is.

```
draw(draws, stream)      -> table (n, k)       the random numbers of a whole batch, made into parameters: once per batch
one(image, row)        -> image            one image (height, width, channels), with its row of that table
many(images, table)    -> images | None    n equal small images at once; None: "one by one, please"
```

An image is uint8 and belongs to the operation: it may be changed in place and handed back. `many`
gives bit for bit what `one` gives.
"""

import operator
from collections.abc import Iterable
from typing import Any

from allstep.data.image.limit import MAX_PIXELS
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError, cut


class Operation:
    """One step of a transform; the base class leaves an image as it is."""

    num_draws = 0
    """How many uniform numbers a sample needs."""
    releases_gil = True
    """Whether other threads run while it works."""

    def draw(self, draws: Draws, stream: str) -> Floats:
        """What this operation wants to know of a batch: plain uniform numbers, unless it makes
        something of them here."""
        return draws.uniform(stream, self.num_draws)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """The image after this step; `row` is this sample's row of what `draw` gave."""
        return image

    def many(self, images: Pixels, table: Floats) -> Pixels | None:
        """The same for n images (n, height, width, channels) and their rows; None where there is
        no quicker way than one by one."""
        return None

    def resizes(self) -> tuple[int, int] | None:
        """(height, width) of what comes out; None: that of what goes in."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._arguments().items())})"

    def _arguments(self) -> dict[str, Any]:
        """The arguments as the user would write them; public attributes unless a class says
        otherwise."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class InPlace(Operation):
    """An operation that changes an image where it lies.

    Of small images, too, it does one after the other.
    """

    def many(self, images: Pixels, table: Floats) -> Pixels | None:
        """By `one`, but without the rest of the way that a single image goes."""
        for image, row in zip(images, table, strict=True):
            self.one(image, row)
        return images


def check_share(what: str, value: float) -> float:
    """`value`, which must be a probability."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{what} is a share from 0 to 1, not {value}")
    return float(value)


def check_range(
    what: str, pair: tuple[float, float], low: float, high: float
) -> tuple[float, float]:
    """`pair`, which must be (smaller, larger) within `low` and `high`."""
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
    """`value`, which must be a whole number from `low` to `high`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if not low <= number <= high:
        raise ConfigError(f"{what} is a whole number from {low} to {high}, not {cut(repr(value))}")
    return number


def check_size(what: str, size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a size that was given as one number or two."""
    try:
        height, width = (
            operator.index(side) for side in (size if isinstance(size, Iterable) else (size, size))
        )
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise ConfigError(
            f"{what} is a number of pixels, or (height, width), not {cut(repr(size))}"
        )
    if height * width > MAX_PIXELS:
        raise ConfigError(
            f"{what}: expected at most {MAX_PIXELS:,} pixels in all, found {cut(repr(size))}"
        )
    return height, width
