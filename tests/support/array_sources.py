"""Sources for tests: arrays, at once or one by one, some of them bad; and a transform whose every
image is random."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.augment.transform import Transform
from allstep.data.sources.source import BadSample, Block, Place, Sample, Source


class Arrays(Source):
    """Arrays in memory; `bad` samples cannot be read."""

    def __init__(
        self, images: NDArray[Any], labels: NDArray[Any] | None = None, bad: tuple[int, ...] = ()
    ) -> None:
        self.images, self.bad = images, frozenset(bad)
        self.labels = np.arange(len(images)) if labels is None else labels

    def __len__(self) -> int:
        return len(self.images)

    def read(self, number: int) -> Sample:
        if number in self.bad:
            raise BadSample(number, self.place(number), "made to be bad")
        fields = {
            "name": f"sample {number}",
            "box": np.array([number, number + 1]),
            "list": list(range(number % 3)),
        }
        return Sample(self.images[number], self.labels[number], fields)

    def place(self, number: int) -> Place:
        return Place("memory", number)

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        if not self.bad.isdisjoint(numbers.tolist()):
            return None
        return Block(self.images[numbers], self.labels[numbers])


class Singly(Arrays):
    """The same, but only one by one."""

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        return None


class Unwilling(Singly):
    """Cannot be opened by another process."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise OSError("not on this host")


def noisy(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random in every pixel: the slightest difference in who draws what shows."""
    noise: NDArray[np.uint8] = image ^ rng.integers(0, 256, image.shape, dtype=np.uint8)
    return noise


def sample_images(n: int, *shape: int) -> NDArray[np.uint8]:
    """n images, all different."""
    return np.random.default_rng(n).integers(0, 256, (n, *(shape or (4, 4, 3))), dtype=np.uint8)


def noise_transform(**options: Any) -> Transform:
    """A transform that makes noise of 4x4x3 images."""
    return Transform(noisy, shape=(4, 4, 3), **options)
