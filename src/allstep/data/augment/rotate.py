"""Rotate an image about its center.

This matches Pillow's `Image.rotate(angle, BILINEAR)`: a positive angle is counterclockwise, the
size stays, and pixels from outside the image have the level `fill`.
"""

import cv2
import numpy as np

from allstep.data.augment.operation import InPlace, check_range
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError


class Rotate(InPlace):
    """Rotate by a random angle.

    The angle is uniform from -`degrees` to `degrees`, or in the range `degrees` = (smallest,
    largest). `fill` is the level, 0 to 255, of pixels from outside the image.
    """

    num_draws = 1

    def __init__(self, degrees: float | tuple[float, float], fill: int = 0) -> None:
        if not 0 <= fill <= 255:
            raise ConfigError(f"the fill of Rotate is a level from 0 to 255, not {fill}")
        pair = (-degrees, degrees) if isinstance(degrees, int | float) else degrees
        self.degrees, self.fill = degrees, fill
        self._range = check_range("the degrees of Rotate", pair, -360, 360)

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Return the table of a batch. Column: the angle in degrees."""
        low, high = self._range
        return low + draws.uniform(stream, 1) * (high - low)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Rotate the image in place and return it."""
        height, width, channels = image.shape
        # OpenCV's coordinates refer to pixel centers.
        middle = (width - 1) / 2, (height - 1) / 2
        matrix = cv2.getRotationMatrix2D(middle, float(row[0]), 1.0)
        turned = cv2.warpAffine(
            image, matrix, (width, height), flags=cv2.INTER_LINEAR, borderValue=(self.fill,) * 4
        )
        image[...] = np.asarray(turned).reshape(height, width, channels)
        return image
