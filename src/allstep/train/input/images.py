"""The stored images of a source, and the transform that turns them into the images of a model.

A model needs images of one size. Operations with a fixed output size provide it (RandomResizedCrop,
CentreCrop, Resize, PadAndCrop(32)). Without one, all stored images must have the same size: the
headers of a few images, spread over the source, are checked.

```
stored                      text in the config                     transform
arrays (h, w), any type     "none"                                 None: images are used as stored
arrays (h, w[, c]) uint8    operations or "none"                   Transform, channels as stored
JPEG, PNG ...               operations; "none" if of one size      Transform, 3 channels
```
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from allstep.data import order
from allstep.data.augment.parse import PRESETS, spelled
from allstep.data.augment.transform import BatchOperation, Transform
from allstep.data.image.limit import check_size
from allstep.data.packing.image import kind_of, size_of
from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
from allstep.data.sources.source import BadSample, Source
from allstep.errors import ConfigError, DataError, cut
from allstep.train.config.data_config import DataConfig

_MAX_INSPECTED = 50
"""Number of good images whose sizes are read."""


@dataclass(frozen=True)
class ImageInfo:
    """Size, channels and type of the images of a source, found by inspecting some of them."""

    sizes: tuple[tuple[int, int], ...]
    """Distinct (height, width) of the inspected images, smallest area first."""
    channels: int
    dtype: str | None
    """Element type of arrays; None for encoded images."""
    flat: bool
    """True for arrays (height, width), which have no channel axis."""
    where: str
    """File of the first inspected image, for messages."""

    @property
    def one_size(self) -> tuple[int, int]:
        """Return the (height, width) of all images, which must be the same."""
        assert len(self.sizes) == 1
        return self.sizes[0]


def inspect_images(source: Source, numbers: order.Numbers, section: DataConfig) -> ImageInfo:
    """Inspect some of the samples `numbers` and return what their images are like.

    One sample is enough where the sizes of the others do not matter: for arrays, and where the
    operations of `section` have a fixed output size. Raise DataError if no sample is good.
    """
    is_array = isinstance(source, ArraySource | IdxSource | CifarSource)
    wanted = 1 if is_array or _has_output_size(section) else _MAX_INSPECTED
    # Some samples may be bad, so try more than are wanted.
    tried = numbers[:: max(1, len(numbers) // (4 * wanted))]
    seen: list[ImageInfo] = []
    reason = "there is none"
    for number in tried.tolist():
        try:
            seen.append(_inspect_sample(source, number, section.max_pixels))
        except BadSample as error:
            reason = str(error)
        except ValueError as error:
            reason = f"sample {number} ({source.place(number)}): {error}"
        if len(seen) == wanted:
            break
    if not seen:
        raise DataError(f"no good image among {len(tried)} that were tried; the last one: {reason}")
    sizes = {each.one_size for each in seen}
    return replace(seen[0], sizes=tuple(sorted(sizes, key=lambda size: size[0] * size[1])))


def _inspect_sample(source: Source, number: int, max_pixels: int) -> ImageInfo:
    """Return what the image of one sample is like; raise an error if the sample is bad."""
    sample, place = source.read(number), source.place(number)
    _check_label(sample.target, str(place))
    return _inspect_image(sample.data, place.file, max_pixels)


def _check_label(target: Any, where: str) -> None:
    """Raise DataError unless a label is one class number, as an integer."""
    if isinstance(target, bool) or not isinstance(target, Integral):
        found = cut(repr(target))
        raise DataError(
            f"{where}: expected a label that is one whole number, the class, found {found}"
        )


def _has_output_size(section: DataConfig) -> bool:
    """Return whether `data.augment` and `data.prepare` both have a fixed output size."""
    return all(_spelled(key, section).shape is not None for key in ("augment", "prepare"))


def _inspect_image(stored: Any, where: str, max_pixels: int) -> ImageInfo:
    """Return what one stored image is like; raise an error if it is not usable."""
    if not isinstance(stored, np.ndarray) or stored.ndim < 2:
        height, width = size_of(stored, kind_of(stored))[:2]
        check_size((height, width), max_pixels)
        return ImageInfo(((height, width),), 3, None, False, where)
    height, width, *channels = stored.shape
    if (channels and channels[0] not in (1, 3)) or len(channels) > 1:
        wanted = "(height, width) or (height, width, channels) with 1 or 3 channels"
        raise DataError(f"{where}: expected images {wanted}, found arrays of shape {stored.shape}")
    return ImageInfo(
        ((height, width),), channels[0] if channels else 1, str(stored.dtype), not channels, where
    )


def make_transform(
    key: str,
    section: DataConfig,
    seen: ImageInfo,
    mix: Sequence[BatchOperation] = (),
    num_classes: int | None = None,
) -> Transform | None:
    """Return the transform of `data.augment` or `data.prepare` for images such as `seen`.

    `key` is "augment" or "prepare". `mix` are operations on whole batches, which need
    `num_classes`. None means that the images are used as they are stored.
    """
    made = _spelled(key, section, seen.channels, mix)
    if seen.flat and not made.operations and not mix:
        return None
    if seen.dtype not in (None, "uint8"):
        raise ConfigError(
            f"config key 'data.{'mix' if mix else key}': operations and colors need images of"
            f" uint8, and those in {seen.where} are {seen.dtype}: store them as uint8"
        )
    if made.shape is None:
        made.shape = (*_only_size(key, seen), seen.channels)
    made.num_classes = num_classes
    return made


def _spelled(
    key: str, section: DataConfig, channels: int = 3, mix: Sequence[BatchOperation] = ()
) -> Transform:
    """Return the transform that a key of the config describes; errors name the key."""
    try:
        made = spelled(getattr(section, key), channels=channels, batch=mix)
    except ConfigError as error:
        raise ConfigError(f"config key 'data.{key}': {error}") from error
    made.max_pixels = section.max_pixels
    return made


def _only_size(key: str, seen: ImageInfo) -> tuple[int, int]:
    """Return the one size of the stored images; raise ConfigError if there are many."""
    if len(seen.sizes) == 1:
        return seen.one_size
    smallest, largest = ("x".join(map(str, size)) for size in (seen.sizes[0], seen.sizes[-1]))
    raise ConfigError(
        f"config key 'data.{key}': images such as {seen.where} have many sizes, from {smallest}"
        f" to {largest}, and a model needs one: begin with an operation of a fixed size, such as"
        f" data.augment={PRESETS['imagenet']!r} data.prepare={PRESETS['imagenet-eval']!r}"
    )
