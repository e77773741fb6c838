"""Arrays in memory as a source (until `allstep.data.arrays` is there)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.source import Block, Place, Sample, Source


class ArraySource(Source):
    """Sample i is `images[i]` with `labels[i]`."""

    def __init__(self, images: NDArray[Any], labels: NDArray[Any]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, number: int) -> Sample:
        return Sample(self.images[number], self.labels[number])

    def place(self, number: int) -> Place:
        return Place("memory", number)

    def block(self, numbers: NDArray[np.int64]) -> Block | None:
        return Block(self.images[numbers], self.labels[numbers])
