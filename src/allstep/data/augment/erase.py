"""Fill a part of the image with one color, so that a model cannot rely on a single detail.

`Cutout` (DeVries and Taylor 2017): a square of fixed size around any pixel, cut off at the border.
`Erase` (random erasing, Zhong et al. 2017): with probability `p` a rectangle of random area and
aspect, wholly inside.
"""

from collections.abc import Sequence

import numpy as np

from allstep.data.augment.operation import InPlace, check_range, check_share, check_whole
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError

_TRIES = 10
_MAX_SIDE = 1_000_000


class _Painter(InPlace):
    """Fills one rectangle of each image with `value`."""

    value: int | tuple[int, ...]

    def rectangle(self, height: int, width: int, row: Floats) -> tuple[int, int, int, int] | None:
        """Return (top, left, bottom, right) of the part to fill, or None for no part."""
        raise NotImplementedError

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Fill the rectangle in place and return the image."""
        found = self.rectangle(image.shape[0], image.shape[1], row)
        if found is not None:
            top, left, bottom, right = found
            image[top:bottom, left:right] = self.value
        return image


class Cutout(_Painter):
    """Fill a square around a random pixel.

    `size` is the side of the square in pixels; at the border of the image it is clipped. `value` is
    the fill level from 0 to 255: one for all channels, or one per channel.
    """

    num_draws = 2

    def __init__(self, size: int, value: int | Sequence[int] = 0) -> None:
        self.size, self.value = check_whole("the size of Cutout", size, 1, _MAX_SIDE), _level(value)

    def rectangle(self, height: int, width: int, row: Floats) -> tuple[int, int, int, int] | None:
        """Return the square, clipped at the top and left border."""
        top = int(row[0] * height) - self.size // 2
        left = int(row[1] * width) - self.size // 2
        return max(0, top), max(0, left), top + self.size, left + self.size


class Erase(_Painter):
    """Fill a random rectangle with probability `p`.

    `area` is the range of its share of the image's area, `aspect` the range of its height / width,
    `value` the fill level from 0 to 255 (one for all channels, or one per channel).

    As in torchvision's RandomErasing, the area is uniform, the aspect is uniform in its logarithm,
    and there are ten tries to find a rectangle smaller than the image; after that, the image stays
    unchanged.
    """

    num_draws = 2 * _TRIES + 3

    def __init__(
        self,
        p: float = 0.5,
        area: tuple[float, float] = (0.02, 0.33),
        aspect: tuple[float, float] = (0.3, 3.3),
        value: int | Sequence[int] = 0,
    ) -> None:
        self.p = check_share("the p of Erase", p)
        self.area = check_range("the area of Erase", area, 0.0, 1.0)
        self.aspect = check_range("the aspect of Erase", aspect, 1e-3, 1e3)
        self.value = _level(value)

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Return the table of a batch.

        Columns: ten heights and ten widths, as shares of the square root of the image's area; top
        and left, as shares of the free space; 1 if the image is changed, else 0.
        """
        table = draws.uniform(stream, self.num_draws)
        area = self.area[0] + table[:, :_TRIES] * (self.area[1] - self.area[0])
        low, high = np.log(self.aspect)
        aspect = np.exp(low + table[:, _TRIES : 2 * _TRIES] * (high - low))
        table[:, :_TRIES], table[:, _TRIES : 2 * _TRIES] = (
            np.sqrt(area * aspect),
            np.sqrt(area / aspect),
        )
        table[:, -1] = table[:, -1] < self.p
        return table

    def rectangle(self, height: int, width: int, row: Floats) -> tuple[int, int, int, int] | None:
        """Return the first of the ten tries that is smaller than the image, or None."""
        if not row[-1]:
            return None
        root = (height * width) ** 0.5
        for attempt in range(_TRIES):
            h, w = round(root * row[attempt]), round(root * row[_TRIES + attempt])
            if h < height and w < width:
                top, left = int(row[-3] * (height - h + 1)), int(row[-2] * (width - w + 1))
                return top, left, top + h, left + w
        return None


def _level(value: int | Sequence[int]) -> int | tuple[int, ...]:
    levels = (value,) if isinstance(value, int) else tuple(value)
    if not levels or not all(isinstance(level, int) and 0 <= level <= 255 for level in levels):
        raise ConfigError(
            f"the fill value is a level from 0 to 255, or one for each channel, not {value!r}"
        )
    return value if isinstance(value, int) else levels
