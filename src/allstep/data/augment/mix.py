"""Mixup and cutmix: combine two samples into one image and one target.

```
mixup   data_i = lam_i * data_i + (1 - lam_i) * data_j                       Zhang et al. 2017
cutmix  data_i = data_j inside a box, else data_i; lam_i = share outside it  Yun et al. 2019
both    target_i = lam_i * target_i + (1 - lam_i) * target_j                 (n, num_classes), float
```

j is the sample before i in the batch (the last sample, for the first one): the order is already
random. **A batch here is one worker's share of the global batch**, so these two are the only
operations whose result depends on the number of workers. lam and the box depend on (seed, epoch,
sample), like all random numbers.

lam is drawn from Beta(alpha, alpha) by inverting its distribution function, which is tabulated
once. With x = s^(1/alpha) / 2, the lower half of the distribution is an integral over s of
(1 - x)^(alpha - 1), which is smooth, while the density itself is infinite at 0 for alpha < 1. The
upper half is the mirror image of the lower one.
"""

from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from allstep.data.random.draws import Draws, Floats
from allstep.errors import ConfigError

_NODES = 4097


class _Mix:
    """The common part of mixup and cutmix: lam, the second sample, and the target."""

    on_batches = True

    def __init__(self, alpha: float, num_classes: int | None = None) -> None:
        if not alpha > 0:
            raise ConfigError(f"the alpha of {type(self).__name__} must be above 0, not {alpha}")
        if num_classes is not None and num_classes < 1:
            raise ConfigError(f"{type(self).__name__} needs at least 1 class, not {num_classes}")
        self.alpha, self.num_classes = alpha, num_classes
        self._below_half = _lower_half(alpha)

    def for_classes(self, num_classes: int | None) -> "_Mix":
        """Return a copy of this operation for `num_classes` classes."""
        if num_classes is None:
            name = type(self).__name__
            raise ConfigError(
                f"{name} must know the number of classes: {name}({self.alpha}, num_classes=...)"
            )
        # The copy includes the table of lam, which takes longer to compute than a batch.
        same = copy(self)
        same.num_classes = num_classes
        return same

    def lam(self, shares: Floats) -> Floats:
        """Return numbers distributed as Beta(alpha, alpha) from uniform numbers `shares`."""
        below = 0.5 * np.interp(np.minimum(shares, 1 - shares), *self._below_half) ** (
            1 / self.alpha
        )
        return np.where(shares < 0.5, below, 1 - below)

    def __repr__(self) -> str:
        classes = "" if self.num_classes is None else f", num_classes={self.num_classes}"
        return f"{type(self).__name__}({self.alpha}{classes})"

    def _mixed_target(self, target: Tensor, lam: Tensor) -> Tensor:
        soft = self._soft(target)
        return lam[:, None] * soft + (1 - lam[:, None]) * soft.roll(1, 0)

    def _soft(self, target: Tensor) -> Tensor:
        """Return targets as (n, num_classes); targets of this form stay as they are."""
        if target.is_floating_point() and target.ndim == 2:
            return target.float()
        assert self.num_classes is not None
        if target.ndim != 1:
            raise ConfigError(
                f"{self!r} mixes targets that are one class each, (n,), not {tuple(target.shape)}"
            )
        # On other devices, reading the values would wait for the device.
        known = target.numel() and target.device.type == "cpu"
        if known and not 0 <= int(target.min()) <= int(target.max()) < self.num_classes:
            raise ConfigError(
                f"{self!r}: the targets {int(target.min())} to {int(target.max())} are not all"
                " classes"
            )
        return one_hot(target.long(), self.num_classes).float()


class Mixup(_Mix):
    """Blends each image with the one before it in the batch.

    The result is float images on the scale 0 to 255 and targets (n, num_classes). `alpha`, above 0:
    the weight of an image is drawn from Beta(alpha, alpha); 0.2 is usual. `num_classes` may be
    omitted if the loader's source knows its classes.
    """

    def __call__(
        self, data: Tensor, target: Tensor, draws: Draws, stream: str
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed data and target."""
        weights = self.lam(draws.uniform(stream, 1)[:, 0]).astype(np.float32)
        lam = torch.from_numpy(weights).to(data.device)
        share = lam.view(-1, 1, 1, 1)
        images = data if data.is_floating_point() else data.float()
        mixed = torch.lerp(images.roll(1, 0), images, share.to(images.dtype))
        return mixed, self._mixed_target(target, lam)


class Cutmix(_Mix):
    """Replaces a box of each image by that of the image before it in the batch.

    Images keep their dtype; targets become (n, num_classes). `alpha`, above 0: the fraction of the
    area outside the box, lam, is drawn from Beta(alpha, alpha); 1.0 is usual. The box has the
    aspect ratio of the image and a random pixel as its center, and is cut off at the border; the
    target counts the area that is left. `num_classes` may be omitted if the loader's source knows
    its classes.
    """

    def __call__(
        self, data: Tensor, target: Tensor, draws: Draws, stream: str
    ) -> tuple[Tensor, Tensor]:
        """Return the mixed data and target."""
        height, width = data.shape[-2:]
        table = draws.uniform(stream, 3)
        side = np.sqrt(1 - self.lam(table[:, 0]))
        rows, columns = (
            _inside(table[:, 1 + i], side, length) for i, length in enumerate((height, width))
        )
        lam = 1 - rows.sum(1) * columns.sum(1) / (height * width)
        box = torch.from_numpy(rows[:, None, :, None] & columns[:, None, None, :]).to(data.device)
        share = torch.from_numpy(lam.astype(np.float32)).to(data.device)
        return torch.where(box, data.roll(1, 0), data), self._mixed_target(target, share)


def _inside(shares: Floats, side: Floats, length: int) -> NDArray[np.bool_]:
    """Return a mask (n, length) of the pixels inside each interval along one side of the image.

    `shares` holds the center and `side` the extent of each interval, as shares of `length`.
    """
    centre, extent = np.floor(shares * length), np.floor(side * length)
    first = centre - extent // 2
    pixel = np.arange(length)
    inside: NDArray[np.bool_] = (pixel >= first[:, None]) & (pixel < (first + extent)[:, None])
    return inside


def _lower_half(alpha: float) -> tuple[Floats, Floats]:
    """Return the distribution function up to 1/2, and s at these values."""
    s = np.linspace(0, 1, _NODES)
    density = (1 - 0.5 * s ** (1 / alpha)) ** (alpha - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return area * (0.5 / area[-1]), s
