"""Crops at the start of a chain: a region of the image, and the size of the result.

A `Frame` computes the region from the image's size and this sample's random numbers only. So the
decoder knows the region before it starts, and need not decode pixels outside it.

```
RandomResizedCrop(224)    a random region: 8 to 100% of the area, aspect 3:4 to 4:3; resized
CentreCrop(224)           shorter side resized to 256, then the middle 224 x 224
Resize(224)               the whole image, resized
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
    """A crop whose result is resized to `size` (height, width)."""

    size: tuple[int, int]

    def region(self, height: int, width: int, row: Floats) -> Region:
        """Return the region to crop from an image of this height and width."""
        raise NotImplementedError

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Return the crop of a decoded image, resized."""
        top, left, height, width = self.region(image.shape[0], image.shape[1], row)
        return resized(image[top : top + height, left : left + width], self.size)

    def resizes(self) -> tuple[int, int] | None:
        """Return `size`."""
        return self.size


class RandomResizedCrop(Frame):
    """A random region of the image, resized to `size`.

    `size` is one number or (height, width), in pixels. `area` is the range of the region's share of
    the image's area, `aspect` the range of its width / height.

    As in torchvision, the area is uniform, the aspect is uniform in its logarithm, and there are
    ten tries to find a region that fits; after that, it is the largest region in the middle whose
    aspect is allowed.
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
        """Return the table of a batch.

        Columns: ten widths and ten heights, as shares of the square root of the image's area; then
        top and left, as shares of the free space.
        """
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
        """Return the first of the ten tries that fits, else the largest region in the middle."""
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
    """The middle of the image, for evaluation.

    The result is as if the shorter side was resized to `shorter` pixels and `size` was cut out of
    the middle. `size` is one number or (height, width), in pixels; `shorter` is `size` / 0.875 by
    default, which is 256 for 224. The region consists of whole pixels of the stored image and is
    resized once.
    """

    def __init__(self, size: int | tuple[int, int], shorter: int | None = None) -> None:
        self.size = check_size("the size of CentreCrop", size)
        self.shorter = round(max(self.size) / 0.875) if shorter is None else shorter
        if self.shorter < max(self.size):
            raise ConfigError(
                f"CentreCrop cannot cut {self.size} out of a shorter side of {self.shorter} pixels"
            )

    def region(self, height: int, width: int, row: Floats) -> Region:
        """Return the region in the middle of the image."""
        scale = min(height, width) / self.shorter
        h, w = (max(1, round(side * scale)) for side in self.size)
        return Region((height - h) // 2, (width - w) // 2, h, w)


class Resize(Frame):
    """The whole image, resized to `size` without keeping its aspect.

    `size` is one number or (height, width), in pixels.
    """

    def __init__(self, size: int | tuple[int, int]) -> None:
        self.size = check_size("the size of Resize", size)

    def region(self, height: int, width: int, row: Floats) -> Region:
        """Return the region of the whole image."""
        return Region(0, 0, height, width)
