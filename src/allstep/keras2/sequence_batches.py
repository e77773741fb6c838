"""`hvd.batches` for Keras 2; `keras_shared.batch_shares` explains the shares and their weights.

`fit` shuffles the order of batches with Python's `random` of each process, and with `workers` above
1 its threads begin the next epoch at a time of their own. The ranks must agree on both, so Keras's
adapter for such data gets `shuffle=False` and one worker; data of other classes stays as it is. In
a graph of `tf.compat.v1` Keras 2 has no such adapter: `hvd.batches` is an error there.
"""

import functools
from typing import Any

import tf_keras
from tf_keras.src.engine.data_adapter import KerasSequenceAdapter

from allstep.keras2 import dialect
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
class Batches(GlobalBatches, tf_keras.utils.Sequence):  # type: ignore[misc]
    """The data of `batches`. `epoch`: the number of the next epoch; set it to resume a training."""

    _keras = dialect

    def __init__(
        self, x: Any, y: Any, batch: int, shuffle: bool, seed: int, sample_weight: Any = None
    ) -> None:
        _keep_order()
        super().__init__(x, y, batch, shuffle, seed, sample_weight)

    @property
    def epoch(self) -> int:
        """The number of the next epoch, which the batches are read from."""
        return self._current

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._current = epoch

    def on_epoch_end(self) -> None:
        """Begin the next epoch. Called by Keras, before it reads the batches of that one."""
        self.epoch += 1


@functools.cache
def _keep_order() -> None:
    """Let Keras read `Batches` in their order, once for all objects."""
    original = KerasSequenceAdapter.__init__

    @functools.wraps(original)
    def init(self: Any, x: Any, *args: Any, **options: Any) -> None:
        if isinstance(x, Batches):
            options |= {"shuffle": False, "workers": 1, "use_multiprocessing": False}
        original(self, x, *args, **options)

    KerasSequenceAdapter.__init__ = init
