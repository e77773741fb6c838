"""Decode no more of an image than the first crop of a chain takes."""

from functools import partial
from typing import Any

from allstep.data.augment.frame import Frame
from allstep.data.image.decode import decode_part
from allstep.data.image.limit import MAX_PIXELS
from allstep.data.image.pixels import Pixels
from allstep.data.image.resize import cut_out
from allstep.data.random.draws import Floats


def cropped(
    data: Any,
    frame: Frame,
    row: Floats,
    channels: int = 3,
    out: Pixels | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Pixels:
    """Return the region that `frame` selects with this sample's random numbers, resized."""
    image, box = decode_part(data, partial(frame.region, row=row), frame.size, channels, max_pixels)
    return cut_out(image, box, frame.size, out)
