"""Brightness, contrast, saturation and hue, as Pillow's ImageEnhance and torchvision define them.

With a factor f, each pixel p becomes base + f * (p - base), clipped to 0 and 255 and truncated to
an integer. f = 1 changes nothing. The base is:

| operation | base |
|---|---|
| Brightness | 0 |
| Contrast | the mean of the grey image, rounded: one level for the whole image |
| Saturation | the grey value of the pixel itself |

where grey = 0.299 R + 0.587 G + 0.114 B (ITU-R 601). Saturation and hue do not change a grey image.
`Hue` rotates the hue of HSV by a share of the circle.

`Brightness(0.4)` draws f uniformly from 0.6 to 1.4, `Brightness((0.8, 1.1))` from that range.
`Hue(0.1)` draws the rotation from -0.1 to 0.1.
"""

from itertools import permutations

import cv2
import numpy as np

from allstep.data.augment.operation import InPlace, check_range
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError

_LEVELS = np.arange(256, dtype=np.float32)
Strength = float | tuple[float, float]


class _Colour(InPlace):
    """Draw one factor per image from the range of `strength` and change the image by it."""

    num_draws = 1
    # The factor that changes nothing.
    around = 1.0
    lowest, highest = 0.0, 100.0

    def __init__(self, strength: Strength) -> None:
        self.strength = strength
        self._range = self._checked(strength)

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Return the table of a batch. Column: the factor."""
        low, high = self._range
        return low + draws.uniform(stream, 1) * (high - low)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Change the image in place and return it."""
        image[...] = self.change(image, float(row[0]))
        return image

    def change(self, image: Pixels, figure: float) -> Pixels:
        """Return the image changed by the factor `figure`."""
        raise NotImplementedError

    def _checked(self, strength: Strength) -> tuple[float, float]:
        name = f"the strength of {type(self).__name__}"
        if isinstance(strength, int | float):
            if strength < 0:
                raise ConfigError(f"{name} is 0 or more, not {strength}")
            strength = max(self.lowest, self.around - strength), self.around + strength
        return check_range(name, strength, self.lowest, self.highest)


class Brightness(_Colour):
    """Multiply all levels by a random factor.

    `strength` s means factors from 1 - s to 1 + s; a pair is the range of factors.
    """

    def change(self, image: Pixels, figure: float) -> Pixels:
        """Return the changed image, by a lookup table of the 256 levels."""
        return _looked_up(image, 0, figure)


class Contrast(_Colour):
    """Move levels away from the image's mean grey or towards it.

    `strength` s means factors from 1 - s to 1 + s; a pair is the range of factors.
    """

    def change(self, image: Pixels, figure: float) -> Pixels:
        """Return the changed image, by a lookup table of the 256 levels around the mean."""
        return _looked_up(image, int(_grey(image).mean() + 0.5), figure)


class Saturation(_Colour):
    """Move colors away from the pixel's own grey or towards it.

    `strength` s means factors from 1 - s to 1 + s; a pair is the range of factors.
    """

    def change(self, image: Pixels, figure: float) -> Pixels:
        """Return OpenCV's weighted sum of image and grey.

        It rounds where Pillow truncates, so results differ by at most one level.
        """
        if image.shape[2] == 1:
            return image
        grey = cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB)
        return np.asarray(cv2.addWeighted(image, figure, grey, 1 - figure, 0), np.uint8)


class Hue(_Colour):
    """Rotate hues by a random share of the circle; 0.5 is the opposite color.

    `strength` s means rotations from -s to s; a pair is the range of rotations.
    """

    around = 0.0
    lowest, highest = -0.5, 0.5

    def change(self, image: Pixels, figure: float) -> Pixels:
        """Return the image with rotated hues, computed in HSV with 256 steps per channel."""
        if image.shape[2] == 1:
            return image
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
        # uint8 wraps around, as hues do.
        hsv[..., 0] += np.uint8(round(figure * 256) % 256)
        return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL), np.uint8)


class ColourJitter(InPlace):
    """Brightness, contrast, saturation and hue in a random order, as torchvision's ColorJitter.

    Each argument is the strength of one operation: a number or a (smallest, largest) pair; 0 leaves
    it out.
    """

    def __init__(
        self,
        brightness: Strength = 0.0,
        contrast: Strength = 0.0,
        saturation: Strength = 0.0,
        hue: Strength = 0.0,
    ) -> None:
        self.brightness, self.contrast, self.saturation, self.hue = (
            brightness,
            contrast,
            saturation,
            hue,
        )
        self._parts = Brightness(brightness), Contrast(contrast), Saturation(saturation), Hue(hue)
        self._orders = tuple(permutations(range(4)))

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Return the table of a batch. Columns: four factors, and the index of the order."""
        figures = [part.draw(draws, f"{stream}/{type(part).__name__}") for part in self._parts]
        return np.hstack([*figures, np.floor(draws.uniform(stream, 1) * len(self._orders))])

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Change the image in place and return it."""
        for number in self._orders[int(row[4])]:
            part = self._parts[number]
            if row[number] != part.around:
                part.one(image, row[number : number + 1])
        return image


def _grey(image: Pixels) -> Pixels:
    """Return the image as grey levels (height, width)."""
    if image.shape[2] == 1:
        return image[..., 0]
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)


def _looked_up(image: Pixels, base: int, factor: float) -> Pixels:
    """Return base + factor * (p - base) for every pixel p.

    The arithmetic is Pillow's: single precision, truncated.
    """
    table = np.clip(base + np.float32(factor) * (_LEVELS - base), 0, 255).astype(np.uint8)
    return np.asarray(cv2.LUT(image, table), np.uint8).reshape(image.shape)
