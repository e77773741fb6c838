"""Stretching a picture to a size.

Bilinear, as OpenCV, tf.data and torchvision (on tensors, without antialiasing) do it: pixel centres are aligned, four neighbours are
weighted. That looks at too few pixels when a picture becomes less than half as large, so it is first halved, each pixel the mean of
four, as often as that leaves at least the size wanted. (OpenCV's own mean over areas of any size takes ten times as long.)
"""

import cv2
import numpy as np

from allstep.data.augment.operation import Picture


def resized(picture: Picture, size: tuple[int, int], out: Picture | None = None) -> Picture:
    """`picture` (height, width, channels) as `size` (height, width); written to `out` when given. Never a view of `picture`."""
    while min(picture.shape[0] // size[0], picture.shape[1] // size[1]) >= 2:
        picture = _halved(picture)
    done = np.asarray(cv2.resize(picture, size[::-1], dst=out, interpolation=cv2.INTER_LINEAR), np.uint8)
    done = done.reshape(*size, picture.shape[2])  # OpenCV drops a single channel
    if out is None or np.shares_memory(done, out):
        return done if out is None else out
    out[...] = done
    return out


def _halved(picture: Picture) -> Picture:
    height, width, channels = picture.shape
    even = picture[: height // 2 * 2, : width // 2 * 2]
    half = cv2.resize(even, (width // 2, height // 2), interpolation=cv2.INTER_AREA)
    return np.asarray(half, np.uint8).reshape(height // 2, width // 2, channels)
