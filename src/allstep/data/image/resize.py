"""Stretching a part of an image to a size.

Bilinear, as OpenCV, tf.data and torchvision (on tensors, without antialiasing) do it: pixel centres
are aligned, four neighbours are weighted. That looks at too few pixels when an image becomes less
than half as large, so it is first reduced by 2, 4, 8 ..., each pixel the mean of its square, as
long as that leaves at least the size wanted. (OpenCV's own mean over areas of any size takes ten
times as long.)
"""

from typing import NamedTuple

import cv2
import numpy as np

from allstep.data.image.pixels import Pixels


class Box(NamedTuple):
    """A part of an image that need not begin or end at whole pixels."""

    top: float
    left: float
    height: float
    width: float


def reduction(height: float, width: float, size: tuple[int, int]) -> int:
    """By what (1, 2, 4, 8 ...) a part of this height and width may be reduced and still be no
    smaller than `size`."""
    ratio = int(min(height / size[0], width / size[1]))
    return 1 << max(0, ratio.bit_length() - 1)


def cut_out(image: Pixels, box: Box, size: tuple[int, int], out: Pixels | None = None) -> Pixels:
    """The part `box` of `image` as `size` (height, width); written to `out` when given."""
    if all(float(edge).is_integer() for edge in box):
        top, left, height, width = (int(edge) for edge in box)
        return resized(image[top : top + height, left : left + width], size, out)
    down, right = box.height / size[0], box.width / size[1]  # pixels there for one pixel here
    matrix = np.array([[right, 0, box.left + right / 2 - 0.5], [0, down, box.top + down / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    done = cv2.warpAffine(
        image, matrix, size[::-1], dst=_dense(out), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return _put(np.asarray(done, np.uint8).reshape(*size, image.shape[2]), out)


def resized(image: Pixels, size: tuple[int, int], out: Pixels | None = None) -> Pixels:
    """`image` (height, width, channels) as `size` (height, width); written to `out` when given.

    Never a view of `image`.
    """
    height, width, channels = image.shape
    by = reduction(height, width, size)
    if by > 1:
        return cut_out(_reduced(image, by), Box(0, 0, height / by, width / by), size, out)
    done = cv2.resize(image, size[::-1], dst=_dense(out), interpolation=cv2.INTER_LINEAR)
    return _put(
        np.asarray(done, np.uint8).reshape(*size, channels), out
    )  # OpenCV drops a single channel


def _reduced(image: Pixels, by: int) -> Pixels:
    """The means of squares; what is left over at the right and below is not in any."""
    height, width, channels = image.shape[0] // by, image.shape[1] // by, image.shape[2]
    squares = image[: height * by, : width * by]
    means = cv2.resize(squares, (width, height), interpolation=cv2.INTER_AREA)
    return np.asarray(means, np.uint8).reshape(height, width, channels)


def _dense(out: Pixels | None) -> Pixels | None:
    """OpenCV writes to memory without gaps only."""
    return out if out is not None and out.flags.c_contiguous else None


def _put(done: Pixels, out: Pixels | None) -> Pixels:
    """`done` in its place. OpenCV has written there already when it could."""
    if out is None:
        return done
    if not np.may_share_memory(done, out):
        out[...] = done
    return out
