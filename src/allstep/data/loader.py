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

_AHEAD = 32  # batches whose sample numbers are computed in one go: a call of numpy costs more than the numbers of a small share


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
            end = min(self.num_samples, offset + stop - position)
            starts = range(offset, end, self.batch)[:_AHEAD]
            yield from self._shares(epoch, starts, end)
            position += min(starts[-1] + self.batch, end) - offset

    def _shares(self, epoch: int, starts: range, end: int) -> Iterator[Batch]:
        """Our shares of the batches that begin at `starts` of an epoch; the last ends at `end` at the latest."""
        mine = [self._positions(start, min(start + self.batch, end)) for start in starts]
        samples = self._samples(epoch, np.concatenate(mine))
        ends = np.cumsum([len(share) for share in mine])
        for start, share in zip(starts, np.split(samples, ends[:-1]), strict=True):
            data, target = torch.from_numpy(self.images[share]), torch.from_numpy(self.labels[share])
            yield Batch(data, target, share, len(share), epoch, epoch * self.num_samples + start)

    def _positions(self, start: int, stop: int) -> order.Numbers:
        mine = order.share(stop - start, self.rank, self.size)
        return np.arange(start + mine.start, start + mine.stop)

    def _samples(self, epoch: int, positions: order.Numbers) -> order.Numbers:
        if self.seed is not None:
            positions = order.epoch_order(positions, self.num_samples, self.seed, epoch)
        return positions if self.numbers is None else self.numbers[positions]
