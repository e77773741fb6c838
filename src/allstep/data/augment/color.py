"""Brightness, contrast, saturation and hue, as Pillow's ImageEnhance and torchvision define them.

With a factor f and each pixel p, out = base + f * (p - base), cut off at 0 and 255, fractions
dropped; f = 1 changes nothing, and

| | base |
|---|---|
| Brightness | 0 |
| Contrast | the mean of the grey image, rounded: one level for the whole image |
| Saturation | the grey of the pixel itself |

where grey = 0.299 R + 0.587 G + 0.114 B (ITU-R 601). Of a grey image, saturation and hue change
nothing. `Hue` turns the hue of HSV by a share of the circle.

`Brightness(0.4)` draws f evenly from 0.6 to 1.4, `Brightness((0.8, 1.1))` from that range.
`Hue(0.1)` draws the turn from -0.1 to 0.1.
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
    """Draws one figure per image from `strength` and changes the image by it."""

    num_draws = 1
    around = 1.0  # what changes nothing
    lowest, highest = 0.0, 100.0

    def __init__(self, strength: Strength) -> None:
        self.strength = strength
        self._range = self._checked(strength)

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Column: the figure."""
        low, high = self._range
        return low + draws.uniform(stream, 1) * (high - low)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """In place."""
        image[...] = self.change(image, float(row[0]))
        return image

    def change(self, image: Pixels, figure: float) -> Pixels:
        """The image changed by `figure`."""
        raise NotImplementedError

    def _checked(self, strength: Strength) -> tuple[float, float]:
        name = f"the strength of {type(self).__name__}"
        if isinstance(strength, int | float):
            if strength < 0:
                raise ConfigError(f"{name} is 0 or more, not {strength}")
            strength = max(self.lowest, self.around - strength), self.around + strength
        return check_range(name, strength, self.lowest, self.highest)


class Brightness(_Colour):
    """All levels times a factor."""

    def change(self, image: Pixels, figure: float) -> Pixels:
        """By a table of the 256 levels."""
        return _looked_up(image, 0, figure)


class Contrast(_Colour):
    """Levels drawn away from the image's mean grey, or towards it."""

    def change(self, image: Pixels, figure: float) -> Pixels:
        """By a table of the 256 levels, around the mean."""
        return _looked_up(image, int(_grey(image).mean() + 0.5), figure)


class Saturation(_Colour):
    """Colours drawn away from the pixel's own grey, or towards it."""

    def change(self, image: Pixels, figure: float) -> Pixels:
        """As OpenCV's weighted sum, which rounds where Pillow drops fractions: one level apart at
        most."""
        if image.shape[2] == 1:
            return image
        grey = cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB)
        return np.asarray(cv2.addWeighted(image, figure, grey, 1 - figure, 0), np.uint8)


class Hue(_Colour):
    """Hues turned by a share of the circle: 0.5 is the opposite colour."""

    around = 0.0
    lowest, highest = -0.5, 0.5

    def change(self, image: Pixels, figure: float) -> Pixels:
        """In HSV with 256 steps each."""
        if image.shape[2] == 1:
            return image
        hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
        hsv[..., 0] += np.uint8(round(figure * 256) % 256)  # goes round, as hues do
        return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL), np.uint8)


class ColourJitter(InPlace):
    """Brightness, contrast, saturation and hue in an order that is drawn for each image, as
    torchvision's ColorJitter."""

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
        """Columns: four figures, and the number of the order."""
        figures = [part.draw(draws, f"{stream}/{type(part).__name__}") for part in self._parts]
        return np.hstack([*figures, np.floor(draws.uniform(stream, 1) * len(self._orders))])

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """In place."""
        for number in self._orders[int(row[4])]:
            part = self._parts[number]
            if row[number] != part.around:
                part.one(image, row[number : number + 1])
        return image


def _grey(image: Pixels) -> Pixels:
    """(height, width)."""
    if image.shape[2] == 1:
        return image[..., 0]
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), np.uint8)


def _looked_up(image: Pixels, base: int, factor: float) -> Pixels:
    """base + factor * (p - base) of every pixel p, in Pillow's arithmetic: single precision,
    fractions dropped."""
    table = np.clip(base + np.float32(factor) * (_LEVELS - base), 0, 255).astype(np.uint8)
    return np.asarray(cv2.LUT(image, table), np.uint8).reshape(image.shape)
