"""Stretching a picture to a size."""

import cv2

from allstep.data.augment.operation import Picture


def resized(picture: Picture, size: tuple[int, int], out: Picture | None = None) -> Picture:
    """`picture` as `size` (height, width); into `out` when given."""
    done = cv2.resize(picture, size[::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    return done.reshape(*size, picture.shape[2])
