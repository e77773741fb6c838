"""What the stored images of a set are like, and the transform that makes those that a model is fed.

A model wants images of one size. An operation that ends at a size gives it (RandomResizedCrop,
CentreCrop, Resize, PadAndCrop(32)); where none does, the stored images must all have one, and a
few are looked at, spread over the set, by their headers.

```
stored                      text in the config                     transform
arrays (h, w), any type     "none"                                 None: they come as they are
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
from allstep.train.config.run_config import DataConfig

_ENOUGH = 50  # good images whose sizes are looked at


@dataclass(frozen=True)
class Look:
    """What was seen of a set: the sizes (height, width) of some images, from the smallest to the
    largest, and what they are."""

    sizes: tuple[tuple[int, int], ...]
    channels: int
    dtype: str | None
    """Of arrays; None: encoded images."""
    flat: bool
    """Whether they are arrays (height, width)."""
    where: str

    @property
    def one_size(self) -> tuple[int, int]:
        """The size of all."""
        assert len(self.sizes) == 1
        return self.sizes[0]


def look(source: Source, numbers: order.Numbers, section: DataConfig) -> Look:
    """At some of the samples with these numbers: at one, where the sizes of the others do not
    matter."""
    one_is_enough = isinstance(source, ArraySource | IdxSource | CifarSource) or _ends_at_a_size(
        section
    )
    wanted = 1 if one_is_enough else _ENOUGH
    tried = numbers[:: max(1, len(numbers) // (4 * wanted))]  # some may be bad
    seen: list[Look] = []
    reason = "there is none"
    for number in tried.tolist():
        try:
            sample = source.read(number)
            _check_label(sample.target, str(source.place(number)))
            seen.append(_look_at(sample.data, source.place(number).file, section.max_pixels))
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


def _check_label(target: Any, where: str) -> None:
    """DataError unless a label is the number of a class: floats and several numbers are not."""
    if isinstance(target, bool) or not isinstance(target, Integral):
        found = cut(repr(target))
        raise DataError(
            f"{where}: expected a label that is one whole number, the class, found {found}"
        )


def _ends_at_a_size(section: DataConfig) -> bool:
    """Whether both chains of operations do, so that any image will do for them."""
    return all(_spelled(key, section).shape is not None for key in ("augment", "prepare"))


def _look_at(stored: Any, where: str, max_pixels: int) -> Look:
    if not isinstance(stored, np.ndarray) or stored.ndim < 2:
        height, width = size_of(stored, kind_of(stored))[:2]
        check_size((height, width), max_pixels)
        return Look(((height, width),), 3, None, False, where)
    height, width, *channels = stored.shape
    if (channels and channels[0] not in (1, 3)) or len(channels) > 1:
        wanted = "(height, width) or (height, width, channels) with 1 or 3 channels"
        raise DataError(f"{where}: expected images {wanted}, found arrays of shape {stored.shape}")
    return Look(
        ((height, width),), channels[0] if channels else 1, str(stored.dtype), not channels, where
    )


def make_transform(
    key: str,
    section: DataConfig,
    seen: Look,
    mix: Sequence[BatchOperation] = (),
    num_classes: int | None = None,
) -> Transform | None:
    """What `data.augment` or `data.prepare` (`key`) makes of images like those that were seen;
    None: they come as they are."""
    made = _spelled(key, section, seen.channels, mix)
    if seen.flat and not made.operations and not mix:
        return None
    if seen.dtype not in (None, "uint8"):
        raise ConfigError(
            f"config key 'data.{'mix' if mix else key}': operations and colours need images of"
            f" uint8, and those in {seen.where} are {seen.dtype}: store them as uint8"
        )
    if made.shape is None:
        made.shape = (*_only_size(key, seen), seen.channels)
    made.num_classes = num_classes
    return made


def _spelled(
    key: str, section: DataConfig, channels: int = 3, mix: Sequence[BatchOperation] = ()
) -> Transform:
    try:
        made = spelled(getattr(section, key), channels=channels, batch=mix)
    except ConfigError as error:
        raise ConfigError(f"config key 'data.{key}': {error}") from error
    made.max_pixels = section.max_pixels
    return made


def _only_size(key: str, seen: Look) -> tuple[int, int]:
    if len(seen.sizes) == 1:
        return seen.one_size
    smallest, largest = ("x".join(map(str, size)) for size in (seen.sizes[0], seen.sizes[-1]))
    raise ConfigError(
        f"config key 'data.{key}': images such as {seen.where} have many sizes, from {smallest}"
        f" to {largest}, and a net needs one: begin with an operation that ends at a size, such as"
        f" data.augment={PRESETS['imagenet']!r} data.prepare={PRESETS['imagenet-eval']!r}"
    )
