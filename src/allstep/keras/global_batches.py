"""`hvd.batches` for Keras 3; `keras_shared.batch_shares` explains the shares and their weights.

`fit` shuffles the order of batches with Python's `random` of each process, unless its `shuffle` is
False. The ranks must agree: from the beginning of an epoch to its first batch, `random` has a
seed of ours, and then its old state again.
"""

import random
from typing import Any

import keras

from allstep.keras import dialect
from allstep.keras_shared.batch_shares import GlobalBatches


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
class Batches(GlobalBatches, keras.utils.PyDataset):  # type: ignore[misc]
    """The data of `batches`. `epoch`: the number of the next epoch; set it to resume a training."""

    _keras = dialect
    _requested = 0
    _random_state: Any = None

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return this rank's share of a global batch: inputs, targets (or None), weights."""
        self._release_random()
        self._requested += 1
        return super().__getitem__(index)

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

    def _release_random(self) -> None:
        """Give `random` its old state again."""
        state, self._random_state = self._random_state, None
        if state is not None:
            random.setstate(state)
