"""What decoders and operations pass to each other: pixels, and a part of an image."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""uint8 (height, width, channels)."""


class Region(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int
