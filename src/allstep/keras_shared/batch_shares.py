"""Training data for any number of workers: the samples of a global batch, divided between ranks.

```
epoch      a permutation of all samples, the same on all ranks
batch i    the next `batch` samples of it
share      a consecutive range of them for each rank, the first ranks one sample longer
weight     n * size / N for each of the n samples of a share of a batch of N
```

Keras divides the weighted sum of the losses by the number of samples, n. So the mean over the ranks
of (n * size / N) * sum / n is the sum over all samples divided by N: the loss and the gradient of
one worker, for any shares. An empty share becomes one sample with weight 0. (Batch normalization
has the statistics of a share, as in Horovod.)

`fit` shuffles the order of batches with Python's `random` of each process, unless its `shuffle` is
False. The ranks must agree, so each front-end prevents that in the way of its Keras.
"""

from typing import Any

import numpy as np

from allstep.hvd.place import size
from allstep.keras_shared.collective_callbacks import Dialect
from allstep.keras_shared.sample_arrays import common_length, map_arrays, share_of


class GlobalBatches:
    """The data of `hvd.batches`: this rank's share of each global batch.

    `epoch`: the number of the next epoch; set it to resume a training. A front-end adds the base
    class of its Keras, `_keras`, and when an epoch begins.
    """

    _keras: Dialect

    def __init__(
        self, x: Any, y: Any, batch: int, shuffle: bool, seed: int, sample_weight: Any = None
    ) -> None:
        super().__init__()
        self._keras.check_exact("hvd.batches")
        size()  # raises unless hvd.init() was called
        if batch < 1:
            raise ValueError(f"batch={batch}: expected the samples of a global batch, at least 1")
        self._data, self._weights = map_arrays(self._keras.as_array, ((x, y), sample_weight))
        self.num_samples = common_length((self._data, self._weights))
        self.batch, self.shuffle, self.seed, self.epoch = batch, shuffle, seed, 0
        self._orders = _Orders(self.num_samples, seed) if shuffle else None
        self._current = 0

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return this rank's share of a global batch: inputs, targets (or None), weights."""
        samples = self._samples(index)
        share = share_of(samples)
        taken = share if len(share) else samples[:1]
        factor = len(share) * size() / len(samples)
        weights = np.full(len(taken), factor, self._keras.floatx())
        if self._weights is not None:
            weights *= self._weights[taken]
        inputs, targets = map_arrays(lambda array: array[taken], self._data)
        return (inputs, targets, weights)

    def _samples(self, index: int) -> "np.ndarray[Any, Any]":
        """Return the numbers of the samples of a global batch."""
        start, end = index * self.batch, min((index + 1) * self.batch, self.num_samples)
        if self._orders is None:
            return np.arange(start, end)
        return self._orders.of_epoch(self._current)[start:end]


class _Orders:
    """The order of the samples in each epoch; keeps the last one."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._last: tuple[int, np.ndarray[Any, Any]] | None = None

    def of_epoch(self, epoch: int) -> "np.ndarray[Any, Any]":
        """Return a permutation of all samples."""
        last = self._last
        if last is None or last[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            last = self._last = (epoch, generator.permutation(self._num_samples))
        return last[1]
