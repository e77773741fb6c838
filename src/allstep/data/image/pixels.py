"""Types that decoders and operations share: pixels, and a region of an image."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""uint8 (height, width, channels)."""


class Region(NamedTuple):
    """A rectangular region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int
