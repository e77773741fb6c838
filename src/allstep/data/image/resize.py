"""Resize a region of an image.

The method is bilinear, as in OpenCV, tf.data and torchvision (on tensors, without antialiasing):
pixel centers are aligned, and four neighbors are weighted. This would ignore pixels when an image
becomes less than half as large. So it is first reduced by 2, 4, 8 ... (each pixel is the mean of a
square), as long as the result is not smaller than the final size. (OpenCV's own mean over areas of
any size takes ten times as long.)
"""

from typing import NamedTuple

import cv2
import numpy as np

from allstep.data.image.pixels import Pixels


class Box(NamedTuple):
    """A region of an image with edges that may be between pixels."""

    top: float
    left: float
    height: float
    width: float


def reduction(height: float, width: float, size: tuple[int, int]) -> int:
    """Return the largest factor (1, 2, 4 ...) that keeps a region at least as large as `size`."""
    ratio = int(min(height / size[0], width / size[1]))
    return 1 << max(0, ratio.bit_length() - 1)


def cut_out(image: Pixels, box: Box, size: tuple[int, int], out: Pixels | None = None) -> Pixels:
    """Return the region `box` of `image`, resized to `size` (height, width).

    The result is written to `out` if given.
    """
    if all(float(edge).is_integer() for edge in box):
        top, left, height, width = (int(edge) for edge in box)
        return resized(image[top : top + height, left : left + width], size, out)
    # Source pixels per output pixel.
    down, right = box.height / size[0], box.width / size[1]
    matrix = np.array([[right, 0, box.left + right / 2 - 0.5], [0, down, box.top + down / 2 - 0.5]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    done = cv2.warpAffine(
        image, matrix, size[::-1], dst=_dense(out), flags=flags, borderMode=cv2.BORDER_REPLICATE
    )
    return _put(np.asarray(done, np.uint8).reshape(*size, image.shape[2]), out)


def resized(image: Pixels, size: tuple[int, int], out: Pixels | None = None) -> Pixels:
    """Return `image` (height, width, channels) resized to `size` (height, width).

    The result is written to `out` if given, and is never a view of `image`.
    """
    height, width, channels = image.shape
    by = reduction(height, width, size)
    if by > 1:
        return cut_out(_reduced(image, by), Box(0, 0, height / by, width / by), size, out)
    done = cv2.resize(image, size[::-1], dst=_dense(out), interpolation=cv2.INTER_LINEAR)
    # OpenCV drops the axis of a single channel.
    return _put(np.asarray(done, np.uint8).reshape(*size, channels), out)


def _reduced(image: Pixels, by: int) -> Pixels:
    """Return the means of squares of `by` pixels; incomplete squares at the edges are dropped."""
    height, width, channels = image.shape[0] // by, image.shape[1] // by, image.shape[2]
    squares = image[: height * by, : width * by]
    means = cv2.resize(squares, (width, height), interpolation=cv2.INTER_AREA)
    return np.asarray(means, np.uint8).reshape(height, width, channels)


def _dense(out: Pixels | None) -> Pixels | None:
    """Return `out` if OpenCV can write to it: it needs contiguous memory."""
    return out if out is not None and out.flags.c_contiguous else None


def _put(done: Pixels, out: Pixels | None) -> Pixels:
    """Return `done` in `out` if given; OpenCV may have written it there already."""
    if out is None:
        return done
    if not np.may_share_memory(done, out):
        out[...] = done
    return out
