"""Batches: this rank's share of each global batch, from any position on.

```
run       | epoch 0                       | epoch 1                       |
position  0        batch     2 batch ...  n                               2n
batch     |--------|--------|--------|----|--------|--------|--------|----|     the last of an epoch is smaller
rank      |0  |1   |0  |1   |0  |1   |0|1 |                                     shares differ by at most one sample
```

Position counts samples of the run and is the loader's whole state: `Loader.batches(position)` goes on where a run with any number of
workers stopped. A batch never spans two epochs, and within an epoch every sample comes once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allstep.data import order


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch."""

    data: torch.Tensor
    target: torch.Tensor
    samples: order.Numbers
    """Numbers of the samples within their set."""
    weight: int
    """How many samples the share has; may be 0."""
    epoch: int
    position: int
    """Samples of the run before this global batch."""


class Loader:
    """Reads samples that lie in memory, in an order that is keyed by `seed` and the epoch.

    `numbers` restricts it to some of the samples (a training set without those held out); `seed=None` keeps them in their order
    (evaluation).
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[np.int64],
        *,
        batch: int,
        seed: int | None = None,
        rank: int = 0,
        size: int = 1,
        numbers: order.Numbers | None = None,
    ) -> None:
        if batch < 1:
            raise ValueError(f"a batch has at least 1 sample, not {batch}")
        self.images, self.labels = images, labels
        self.batch, self.seed, self.rank, self.size = batch, seed, rank, size
        self.numbers = numbers
        self.num_samples = len(labels) if numbers is None else len(numbers)

    def batches(self, position: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """This rank's shares from `position` to `stop`, both in samples of the run; one epoch from the start when nobody says."""
        stop = self.num_samples if stop is None else stop
        while position < stop:
            epoch, offset = divmod(position, self.num_samples)
            count = min(self.batch, self.num_samples - offset, stop - position)
            yield self._share(epoch, offset, position, count)
            position += count

    def _share(self, epoch: int, offset: int, position: int, count: int) -> Batch:
        mine = order.share(count, self.rank, self.size)
        samples = self._samples(epoch, np.arange(offset + mine.start, offset + mine.stop))
        data, target = torch.from_numpy(self.images[samples]), torch.from_numpy(self.labels[samples])
        return Batch(data, target, samples, len(samples), epoch, position)

    def _samples(self, epoch: int, positions: order.Numbers) -> order.Numbers:
        if self.seed is not None:
            positions = order.epoch_order(positions, self.num_samples, self.seed, epoch)
        return positions if self.numbers is None else self.numbers[positions]
