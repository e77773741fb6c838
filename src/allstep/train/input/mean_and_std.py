"""Mean and std of a training set's images, by channel: what is taken off and divided by before a
model sees them.

Measured on up to 5,000 training images, spread over the set and made ready as for evaluation (up
to 1,000 where they must be decoded). uint8 has 256 levels, so they are counted, and the figures are
the same on every machine.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from allstep.data.loading.fill import Recipe, drop_bad, fill, gives_blocks
from allstep.errors import DataError
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Splits

_IMAGES, _DECODED = 5000, 1000
_AT_ONCE = 1 << 22  # bytes of images: they stay in the cache
_LEAST = 1e-3  # a channel that is the same everywhere has no std to divide by


def measure(splits: Splits) -> dict[str, tuple[float, ...]]:
    """`mean` and `std` of each channel, from 0 to 255; as the config gives them, where it does."""
    if splits.mean is not None and splits.std is not None:
        return {"mean": splits.mean, "std": splits.std}
    count, total, squares = 0, np.zeros(splits.shape[0]), np.zeros(splits.shape[0])
    for images in _some_images(splits):
        number, first, second = _moments(images)
        count, total, squares = count + number, total + first, squares + second
    if not count:
        raise DataError(
            f"{splits.place}: no good image to measure the mean of; set data.mean and data.std"
        )
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return {"mean": tuple(mean.tolist()), "std": tuple(np.maximum(std, _LEAST).tolist())}


def _some_images(splits: Splits) -> Iterator[NDArray[np.generic]]:
    """Blocks (n, height, width, channels)."""
    split, seen = splits.train, splits.train.seen
    transform = make_transform("prepare", splits.section, seen)
    numbers = split.some(_IMAGES if seen.dtype is not None else _DECODED)
    recipe = Recipe(split.source, transform, blocks=gives_blocks(split.source, transform, numbers))
    height, width, channels = (
        transform.shape if transform is not None and transform.shape else (*seen.one_size, 1)
    )
    each = max(1, _AT_ONCE // (height * width * channels))
    for begin in range(0, len(numbers), each):
        some = numbers[begin : begin + each]
        out = (
            None if transform is None else np.empty((len(some), height, width, channels), np.uint8)
        )
        rows = fill(recipe, some, out, recipe.draw(0, some))
        images = np.asarray(rows.data) if out is None else drop_bad(out, sorted(rows.bad))
        yield images.reshape(-1, height, width, channels)


def _moments(images: NDArray[np.generic]) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Pixels of a channel, and the sums of its levels and of their squares."""
    flat = images.reshape(-1, images.shape[-1])
    if flat.dtype != np.uint8:
        values = flat.astype(np.float64)
        return len(flat), values.sum(0), (values**2).sum(0)
    levels = np.arange(256.0)
    counts = np.stack(
        [np.bincount(flat[:, channel], minlength=256) for channel in range(flat.shape[1])]
    )
    return len(flat), counts @ levels, counts @ levels**2
