"""Pad and crop: the usual augmentation of small images (ResNet, arXiv:1512.03385, section 4.2).

```
+-----------------+
| pad             |     The image gets a border of `pad` pixels: black, or its mirror image.
|  +-----------+  |     A region of `size` is then cut out at a random position.
|  |   image   |  |
|  |           |  |     mode "reflect" mirrors without repeating the edge, as numpy and
|  +-----------+  |     torchvision do: c b | a b c | b a
+-----------------+
```
"""

import cv2
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from allstep.data.augment.operation import Operation, check_size, check_whole
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Floats
from allstep.errors import ConfigError, did_you_mean

_MODES = {"zero": cv2.BORDER_CONSTANT, "reflect": cv2.BORDER_REFLECT_101}
# With this border an image of 32 x 32 already becomes 4 million pixels, of which 32 x 32 are used.
_MAX_PAD = 1000
_NUMPY_MODES = {"zero": "constant", "reflect": "reflect"}


class PadAndCrop(Operation):
    """Pad by `pad` pixels on all sides, then cut out `size` at a random position.

    `size` is one number or (height, width); None keeps the image's size. `mode` of the border is
    "zero" or "reflect".
    """

    num_draws = 2

    def __init__(
        self, size: int | tuple[int, int] | None = None, pad: int = 4, mode: str = "zero"
    ) -> None:
        if mode not in _MODES:
            raise ConfigError(f"PadAndCrop has no mode {mode!r}; {did_you_mean(mode, _MODES)}")
        self.size = None if size is None else check_size("the size of PadAndCrop", size)
        self.pad, self.mode = check_whole("the pad of PadAndCrop", pad, 0, _MAX_PAD), mode

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Return the crop of one image, always in new memory."""
        (height, width), tops, lefts = self._places(image.shape[:2], row[None])
        pad, top, left = self.pad, int(tops[0]), int(lefts[0])
        padded = np.asarray(
            cv2.copyMakeBorder(image, pad, pad, pad, pad, _MODES[self.mode], value=(0, 0, 0, 0))
        )
        padded = padded.reshape(*padded.shape[:2], image.shape[2])
        return padded[top : top + height, left : left + width].astype(np.uint8)

    def many(self, images: Pixels, table: Floats) -> Pixels | None:
        """Return the crops, selected from one view of all windows of the padded images."""
        pad = self.pad
        (height, width), tops, lefts = self._places(images.shape[1:3], table)
        borders = [(0, 0), (pad, pad), (pad, pad), (0, 0)]
        return _windows(_padded(images, borders, self.mode), height, width)[
            np.arange(len(images)), tops, lefts
        ]

    def resizes(self) -> tuple[int, int] | None:
        """Return `size`, which may be None."""
        return self.size

    def _places(
        self, shape: tuple[int, ...], table: Floats
    ) -> tuple[tuple[int, int], NDArray[np.int64], NDArray[np.int64]]:
        """Return the windows' size, and their top and left positions in the padded images."""
        size = self.size or (shape[0], shape[1])
        room = [side + 2 * self.pad - wanted for side, wanted in zip(shape, size, strict=True)]
        if min(room) < 0 or (self.mode == "reflect" and self.pad >= min(shape)):
            raise ConfigError(f"{self!r} does not fit images of {shape[0]} x {shape[1]} pixels")
        tops, lefts = ((table[:, i] * (room[i] + 1)).astype(np.int64) for i in (0, 1))
        return size, tops, lefts


def _padded(images: Pixels, borders: list[tuple[int, int]], mode: str) -> Pixels:
    """Return `images` with borders, as `np.pad` does; by hand for zeros, which is faster."""
    if mode != "zero":
        return np.pad(images, borders, mode="reflect")
    pad = borders[1][0]
    n, height, width, channels = images.shape
    padded = np.zeros((n, height + 2 * pad, width + 2 * pad, channels), np.uint8)
    padded[:, pad : pad + height, pad : pad + width] = images
    return padded


def _windows(padded: Pixels, height: int, width: int) -> Pixels:
    """Return a view (n, tops, lefts, height, width, channels) of all windows of this size."""
    n, rows, columns, channels = padded.shape
    a, b, c, d = padded.strides
    shape = (n, rows - height + 1, columns - width + 1, height, width, channels)
    return as_strided(padded, shape, (a, b, c, b, c, d), writeable=False)
