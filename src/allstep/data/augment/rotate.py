"""Turning an image about its middle.

As Pillow's `Image.rotate(angle, BILINEAR)`: a positive angle turns against the clock, the size
stays, and what comes in from outside has the level `fill`.
"""

import cv2
import numpy as np

from allstep.data.augment.operation import InPlace, check_range
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError


class Rotate(InPlace):
    """Turns by an angle drawn evenly from -`degrees` to `degrees`, or from a range (smallest,
    largest)."""

    num_draws = 1

    def __init__(self, degrees: float | tuple[float, float], fill: int = 0) -> None:
        if not 0 <= fill <= 255:
            raise ConfigError(f"the fill of Rotate is a level from 0 to 255, not {fill}")
        pair = (-degrees, degrees) if isinstance(degrees, int | float) else degrees
        self.degrees, self.fill = degrees, fill
        self._range = check_range("the degrees of Rotate", pair, -360, 360)

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Column: the angle."""
        low, high = self._range
        return low + draws.uniform(stream, 1) * (high - low)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """In place."""
        height, width, channels = image.shape
        middle = (width - 1) / 2, (height - 1) / 2  # OpenCV counts from pixel centres
        matrix = cv2.getRotationMatrix2D(middle, float(row[0]), 1.0)
        turned = cv2.warpAffine(
            image, matrix, (width, height), flags=cv2.INTER_LINEAR, borderValue=(self.fill,) * 4
        )
        image[...] = np.asarray(turned).reshape(height, width, channels)
        return image
