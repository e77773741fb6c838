"""Crops that begin a chain: which part of an image is taken, and the size it comes out with.

A `Frame` only says where to look, from the image's size and this sample's random numbers. So the
decoder can be told before it starts, and what lies outside need not be decoded.

```
RandomResizedCrop(224)    a random part, 8 to 100% of the area, aspect 3:4 to 4:3, stretched to 224 x 224
CentreCrop(224)           the middle: what is left when the shorter side becomes 256 and 224 x 224 of that are cut out
Resize(224)               all of it, stretched
```
"""

import numpy as np

from allstep.data.augment.operation import Operation, check_range, check_size
from allstep.data.image.pixels import Pixels, Region
from allstep.data.image.resize import resized
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError

_TRIES = 10


class Frame(Operation):
    """A crop that becomes `size` (height, width)."""

    size: tuple[int, int]

    def region(self, height: int, width: int, row: Floats) -> Region:
        """The part that is taken of an image of this height and width."""
        raise NotImplementedError

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """The crop of an image that is decoded already."""
        top, left, height, width = self.region(image.shape[0], image.shape[1], row)
        return resized(image[top : top + height, left : left + width], self.size)

    def resizes(self) -> tuple[int, int] | None:
        """Always `size`."""
        return self.size


class RandomResizedCrop(Frame):
    """A random part of the image, stretched to `size`: of `area` (share of the image's) and
    `aspect` (width / height).

    As torchvision's: area uniform, aspect uniform in its logarithm, ten tries to find a part that
    fits, then the largest part in the middle whose aspect is allowed.
    """

    num_draws = 2 * _TRIES + 2

    def __init__(
        self,
        size: int | tuple[int, int],
        area: tuple[float, float] = (0.08, 1.0),
        aspect: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        self.size = check_size("the size of RandomResizedCrop", size)
        self.area = check_range("the area of RandomResizedCrop", area, 1e-6, 1.0)
        self.aspect = check_range("the aspect of RandomResizedCrop", aspect, 1e-3, 1e3)

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Columns: ten widths and ten heights, as shares of the root of the image's area; then
        where, as shares of the room."""
        table = draws.uniform(stream, self.num_draws)
        areas, aspects = table[:, :_TRIES], table[:, _TRIES : 2 * _TRIES]
        area = self.area[0] + areas * (self.area[1] - self.area[0])
        low, high = np.log(self.aspect)
        aspect = np.exp(low + aspects * (high - low))
        table[:, :_TRIES], table[:, _TRIES : 2 * _TRIES] = (
            np.sqrt(area * aspect),
            np.sqrt(area / aspect),
        )
        return table

    def region(self, height: int, width: int, row: Floats) -> Region:
        """The first try that fits."""
        root = (height * width) ** 0.5
        numbers = row.tolist()
        for attempt in range(_TRIES):
            w, h = round(root * numbers[attempt]), round(root * numbers[_TRIES + attempt])
            if 0 < w <= width and 0 < h <= height:
                top, left = (
                    int(share * (room + 1))
                    for share, room in zip(numbers[-2:], (height - h, width - w), strict=True)
                )
                return Region(top, left, h, w)
        return self._middle(height, width)

    def _middle(self, height: int, width: int) -> Region:
        low, high = self.aspect
        w = min(width, max(1, round(height * high)))
        h = min(height, max(1, round(width / low)))
        return Region((height - h) // 2, (width - w) // 2, h, w)


class CentreCrop(Frame):
    """The middle of the image, for evaluation: as if its shorter side became `shorter` and `size`
    were cut out of that.

    `shorter` is `size` / 0.875 when nobody says: 256 for 224. The part is whole pixels of the
    stored image, scaled once.
    """

    def __init__(self, size: int | tuple[int, int], shorter: int | None = None) -> None:
        self.size = check_size("the size of CentreCrop", size)
        self.shorter = round(max(self.size) / 0.875) if shorter is None else shorter
        if self.shorter < max(self.size):
            raise ConfigError(
                f"CentreCrop cannot cut {self.size} out of a shorter side of {self.shorter} pixels"
            )

    def region(self, height: int, width: int, row: Floats) -> Region:
        """The middle of every image."""
        scale = min(height, width) / self.shorter
        h, w = (max(1, round(side * scale)) for side in self.size)
        return Region((height - h) // 2, (width - w) // 2, h, w)


class Resize(Frame):
    """The whole image, stretched to `size`, whatever its aspect."""

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = check_size("the size of Resize", size)

    def region(self, height: int, width: int, row: Floats) -> Region:
        """All of it."""
        return Region(0, 0, height, width)
