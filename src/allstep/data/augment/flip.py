"""Horizontal flip.

With independent random flips, two epochs show a sample in the same orientation half of the time.
The alternating flip (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds") flips it in every second
epoch, so that two consecutive epochs always show both orientations:

```
epoch            0  1  2  3  4
sample 17        R  L  R  L  R        (seed, sample) decides which one comes first
sample 18        L  R  L  R  L
```
"""

import cv2
import numpy as np

from allstep.data.augment.operation import Operation, check_share
from allstep.data.image.pixels import Pixels
from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError


class Flip(Operation):
    """Flip the image horizontally with probability `p`.

    With `alternating=True`, flip it in every second epoch instead; `p` then has to be 0.5.
    """

    num_draws = 1

    def __init__(self, p: float = 0.5, *, alternating: bool = False) -> None:
        self.p = check_share("the p of Flip", p)
        self.alternating = alternating
        if alternating and p != 0.5:
            raise ConfigError(f"an alternating Flip flips every second time: p={p} has no meaning")

    def draw(self, draws: Draws, stream: str) -> Floats:
        """Return the table of a batch. Column: 1 if the image is flipped, else 0."""
        if self.alternating:
            first = draws.lasting(stream, 1) < 0.5
            flipped = first ^ bool(draws.epoch % 2)
        else:
            flipped = draws.uniform(stream, 1) < self.p
        return flipped.astype(np.float64)

    def one(self, image: Pixels, row: Floats) -> Pixels:
        """Flip the image in place if its row requests that, and return it."""
        if row[0] and image.flags.c_contiguous:
            cv2.flip(image, 1, dst=image)
        elif row[0]:
            image[...] = image[:, ::-1].copy()
        return image

    def many(self, images: Pixels, table: Floats) -> Pixels | None:
        """Flip the images whose row requests that, all at once and in place."""
        chosen = np.flatnonzero(table[:, 0])
        images[chosen] = images[chosen, :, ::-1]
        return images
