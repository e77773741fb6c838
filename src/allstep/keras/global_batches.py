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
False. The ranks must agree: from the beginning of an epoch to its first batch, `random` has a
seed of ours, and then its old state again.
"""

import random
from typing import Any

import keras
import numpy as np

from allstep.hvd.place import rank, size


def batches(
    x: Any,
    y: Any = None,
    batch: int = 512,
    shuffle: bool = True,
    seed: int = 0,
    sample_weight: Any = None,
) -> "Batches":
    """Return data for `model.fit`: this rank's share of each global batch.

    - `x`, `y`: arrays, or lists or dicts of arrays, with all samples, the same on all ranks.
    - `batch`: the number of samples of a global batch, over all ranks (default: 512).
    - `shuffle`: whether each epoch has another order of the samples (default: True).
    - `seed`: chooses these orders.
    - `sample_weight`: a weight for each sample (default: 1).
    """
    return Batches(x, y, batch, shuffle, seed, sample_weight)


# Keras has no type annotations.
class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """The data of `batches`. `epoch`: the number of the next epoch; set it to resume a training."""

    def __init__(
        self, x: Any, y: Any, batch: int, shuffle: bool, seed: int, sample_weight: Any = None
    ) -> None:
        super().__init__()
        size()  # raises unless hvd.init() was called
        if batch < 1:
            raise ValueError(f"batch={batch}: expected the samples of a global batch, at least 1")
        data = (x,) if y is None else (x, y)
        # TensorFlow takes a list for one tensor.
        self._data = keras.tree.lists_to_tuples(keras.tree.map_structure(as_array, data))
        self._weights = None if sample_weight is None else as_array(sample_weight)
        weights = () if self._weights is None else self._weights
        self.num_samples = common_length((self._data, weights))
        self.batch, self.shuffle, self.seed, self.epoch = batch, shuffle, seed, 0
        self._orders = _Orders(self.num_samples, seed) if shuffle else None
        self._current, self._requested = 0, 0
        self._random_state: Any = None

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return this rank's share of a global batch: inputs, targets (if any), sample weights."""
        self._release_random()
        self._requested += 1
        samples = self._samples(index)
        share = share_of(samples)
        taken = share if len(share) else samples[:1]
        factor = len(share) * size() / len(samples)
        weights = np.full(len(taken), factor, keras.backend.floatx())
        if self._weights is not None:
            weights *= self._weights[taken]
        picked = keras.tree.map_structure(lambda array: array[taken], self._data)
        targets = picked[1] if len(picked) > 1 else None
        return (picked[0], targets, weights)

    def on_epoch_begin(self) -> None:
        """Begin the next epoch. Called by Keras."""
        self._current, self._requested = self.epoch, 0
        self.epoch += 1
        self._release_random()
        self._random_state = random.getstate()
        random.seed(f"{self.seed} {self._current}")

    def on_epoch_end(self) -> None:
        """End an epoch. Called by Keras."""
        self._release_random()
        if keras.backend.backend() != "tensorflow" and 0 < self._requested < min(3, len(self)):
            # Keras read a batch (on a GPU one more) to build the model: not an epoch.
            self.epoch -= 1
        self._requested = 0

    def _samples(self, index: int) -> "np.ndarray[Any, Any]":
        """Return the numbers of the samples of a global batch."""
        start, end = index * self.batch, min((index + 1) * self.batch, self.num_samples)
        if self._orders is None:
            return np.arange(start, end)
        return self._orders.of_epoch(self._current)[start:end]

    def _release_random(self) -> None:
        """Give `random` its old state again."""
        state, self._random_state = self._random_state, None
        if state is not None:
            random.setstate(state)


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


def share_of(samples: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return this rank's consecutive range; the first ranks have one more if it is uneven."""
    each, more = divmod(len(samples), size())
    start = rank() * each + min(rank(), more)
    return samples[start : start + each + (rank() < more)]


def as_array(value: Any) -> "np.ndarray[Any, Any]":
    """Return an array that can be indexed by a list of samples; do not copy a numpy array."""
    if isinstance(value, np.ndarray):
        return value
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    if not hasattr(value, "__array__"):
        raise ValueError(
            f"{type(value).__name__}: expected arrays with all samples, such as numpy arrays"
        )
    return np.asarray(value)


def common_length(data: Any) -> int:
    """Return the number of samples; raise ValueError if the arrays differ in it."""
    arrays = keras.tree.flatten(data)
    lengths = {len(array) if array.ndim else 0 for array in arrays}
    if len(lengths) != 1 or lengths == {0}:
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise ValueError(
            f"arrays of the shapes {shapes}: expected the same number of samples in all, at least 1"
        )
    return lengths.pop()
