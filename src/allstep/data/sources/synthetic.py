"""Generated images of any size and number, for benchmarks and tests without a download.

Every image is computed from its number, so all workers and all runs read the same images. There
are `variety` different images (default 64), and sample n is image n % variety: a new image per
sample would make a benchmark measure the generation. They are generated on first use. They are
smooth patterns plus noise, so that their JPEGs are about as large as those of photographs of the
same size.

```
encoded=True      data is the bytes of a JPEG, as in a record: a benchmark includes decoding
encoded=False     data is an array (height, width, channels), uint8
```

In paths and configs, `synthetic:1000x224x224` means 1000 JPEGs of 224 x 224; `synthetic:1000` means
the same, and `synthetic:1000x96` means 1000 of 96 x 96.
"""

import re
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.source import Block, Place, Sample, Source
from allstep.errors import ConfigError

_SCHEME = "synthetic:"
_NUMBER = re.compile("[0-9]{1,18}")


class SyntheticSource(Source):
    """`n` generated images of `height` x `width` pixels in `num_classes` classes.

    - `width`: default is `height`.
    - `channels`: 1 or 3.
    - `encoded`: deliver the bytes of JPEGs of this `quality` (default), else uint8 arrays.
    - `variety`: number of different images, which repeat.
    - `seed`: seed of the images' content.
    """

    def __init__(
        self,
        n: int,
        height: int = 224,
        width: int | None = None,
        *,
        channels: int = 3,
        num_classes: int = 1000,
        encoded: bool = True,
        variety: int = 64,
        quality: int = 90,
        seed: int = 0,
    ) -> None:
        width = height if width is None else width
        if min(n, height, width, num_classes, variety) < 1 or channels not in (1, 3):
            given = f"{n} of {height}x{width}x{channels}, {num_classes} classes, variety {variety}"
            raise ConfigError(
                f"synthetic images: expected sizes of 1 or more and 1 or 3 channels, found {given}"
            )
        variety, size = min(variety, n), (height, width, channels)
        self._given = (n, *size, num_classes, encoded, variety, quality, seed)
        self._n, self._shape, self._num_classes, self._encoded = n, size, num_classes, encoded
        self._variety, self._quality, self._seed = variety, quality, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, self._given

    def __len__(self) -> int:
        return self._n

    def read(self, number: int) -> Sample:
        self._must_have(number)
        kind = number % self._variety
        return Sample(
            self._files[kind] if self._encoded else self._images[kind], number % self._num_classes
        )

    def place(self, number: int) -> Place:
        self._must_have(number)
        return Place("synthetic", number)

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        if self._encoded:
            return None
        for number in (int(numbers.min()), int(numbers.max())) if len(numbers) else ():
            self._must_have(number)
        return Block(self._images[numbers % self._variety], numbers % self._num_classes)

    def targets(self) -> NDArray[np.int64]:
        return np.arange(self._n) % self._num_classes

    def _must_have(self, number: int) -> None:
        if not 0 <= number < self._n:
            raise IndexError(f"sample {number} of {self._n}")

    @cached_property
    def _images(self) -> NDArray[np.uint8]:
        return np.stack(
            [_image(self._shape, self._seed, number) for number in range(self._variety)]
        )

    @cached_property
    def _files(self) -> list[bytes]:
        return [_jpeg(image, self._quality) for image in self._images]


def is_synthetic(text: str) -> bool:
    """Return whether `text` names generated images."""
    return text.startswith(_SCHEME)


def synthetic(text: str, num_classes: int | None = None) -> SyntheticSource:
    """Return the source that `text`, such as "synthetic:1000x224x224", names.

    `num_classes` is the number of classes (default: 1000).
    """
    numbers = text.removeprefix(_SCHEME).split("x")
    if len(numbers) > 3 or not all(map(_NUMBER.fullmatch, numbers)):
        raise ConfigError(
            f"{text[:60]}: expected {_SCHEME}NUMBERxHEIGHTxWIDTH, such as {_SCHEME}1000x224x224"
        )
    return SyntheticSource(*map(int, numbers), num_classes=num_classes or 1000)


def _image(shape: tuple[int, int, int], seed: int, number: int) -> NDArray[np.uint8]:
    """Return a sum of a few waves, different for each channel, and noise."""
    random = np.random.default_rng((seed, number))
    height, width, channels = shape
    rows, columns = (
        np.arange(height, dtype=np.float32)[:, None, None],
        np.arange(width, dtype=np.float32)[None, :, None],
    )
    image = np.full(shape, 128, np.float32)
    for _ in range(4):
        down, across, phase = random.uniform(0.005, 0.15, (3, channels)).astype(np.float32)
        image += 24 * np.sin(rows * down + columns * across + 40 * phase)
    image += random.normal(0, 6, shape).astype(np.float32)
    return image.clip(0, 255).astype(np.uint8)


def _jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    # Imported here: only encoded images need it.
    import simplejpeg

    colors, subsampling = ("RGB", "420") if image.shape[2] == 3 else ("GRAY", "Gray")
    pixels = np.ascontiguousarray(image)
    return bytes(simplejpeg.encode_jpeg(pixels, quality, colors, subsampling))


def _remake(*given: Any) -> SyntheticSource:
    """Return the source that was pickled with these arguments."""
    n, height, width, channels, num_classes, encoded, variety, quality, seed = given
    return SyntheticSource(
        n,
        height,
        width,
        channels=channels,
        num_classes=num_classes,
        encoded=encoded,
        variety=variety,
        quality=quality,
        seed=seed,
    )
