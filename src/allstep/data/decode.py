"""From stored bytes to a picture."""

from typing import Any

import cv2
import numpy as np

from allstep.data.augment.frame import Frame
from allstep.data.augment.operation import Picture
from allstep.data.augment.resize import resized
from allstep.data.draws import Floats


def decode(data: Any, channels: int = 3) -> Picture:
    """The whole picture, uint8 (height, width, channels), in memory of its own."""
    if isinstance(data, np.ndarray) and data.ndim > 1:
        return np.array(data[..., None] if data.ndim == 2 else data)
    picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    if picture is None:
        raise ValueError("not a picture")
    return picture


def cropped(data: Any, frame: Frame, row: Floats, channels: int = 3, out: Picture | None = None) -> Picture:
    """The part of the picture that `frame` takes, in its size; into `out` when given."""
    picture = decode(data, channels)
    top, left, height, width = frame.region(*picture.shape[:2], row)
    done = resized(picture[top : top + height, left : left + width], frame.size, out)
    if out is None or done is out:
        return done
    out[...] = done
    return out
