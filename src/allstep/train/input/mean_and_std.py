"""Mean and std of the training images by channel, with which the input of a model is normalized.

They are measured on up to 5,000 training images (up to 1,000 if they must be decoded), spread over
the split and prepared as for evaluation. The 256 levels of uint8 are counted in integers, so the
result is the same on every machine.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from allstep.data.loading.fill import Recipe, drop_bad, fill, gives_blocks
from allstep.errors import DataError
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Splits

_MAX_IMAGES, _MAX_DECODED = 5000, 1000
_BLOCK_BYTES = 1 << 22
"""Size of the blocks in which images are read; small enough for the cache."""
_MIN_STD = 1e-3
"""Lower limit of the std: a constant channel has std 0, by which nothing can be divided."""


def measure(splits: Splits) -> dict[str, tuple[float, ...]]:
    """Return `mean` and `std` of each channel, in levels from 0 to 255.

    They are measured unless the config gives them. Raise DataError if there is no good image.
    """
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
    return {"mean": tuple(mean.tolist()), "std": tuple(np.maximum(std, _MIN_STD).tolist())}


def _some_images(splits: Splits) -> Iterator[NDArray[np.generic]]:
    """Yield blocks (n, height, width, channels) of prepared training images."""
    split, seen = splits.train, splits.train.seen
    transform = make_transform("prepare", splits.section, seen)
    numbers = split.some(_MAX_IMAGES if seen.dtype is not None else _MAX_DECODED)
    recipe = Recipe(split.source, transform, blocks=gives_blocks(split.source, transform, numbers))
    fixed = None if transform is None else transform.shape
    height, width, channels = fixed or (*seen.one_size, 1)
    each = max(1, _BLOCK_BYTES // (height * width * channels))
    for begin in range(0, len(numbers), each):
        some = numbers[begin : begin + each]
        shape = (len(some), height, width, channels)
        out = None if transform is None else np.empty(shape, np.uint8)
        rows = fill(recipe, some, out, recipe.draw(0, some))
        images = np.asarray(rows.data) if out is None else drop_bad(out, sorted(rows.bad))
        yield images.reshape(-1, height, width, channels)


def _moments(images: NDArray[np.generic]) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Return pixels per channel, and by channel the sums of levels and of squared levels."""
    flat = images.reshape(-1, images.shape[-1])
    if flat.dtype != np.uint8:
        values = flat.astype(np.float64)
        return len(flat), values.sum(0), (values**2).sum(0)
    levels = np.arange(256.0)
    counts = np.stack(
        [np.bincount(flat[:, channel], minlength=256) for channel in range(flat.shape[1])]
    )
    return len(flat), counts @ levels, counts @ levels**2
