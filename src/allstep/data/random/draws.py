"""Random numbers that depend on the sample, and not on the worker or batch that computes it.

```
seed, epoch ---blake2b--> key --+
                                |
sample number ------------------+--hash--> 64 bits of the sample --+
                                                                   |
stream ("Flip", "Erase:1") ---blake2b--> key ----------------------+--hash--> columns 0, 1, 2 ...
                                                                              in [0, 1)
```

A number depends on (seed, epoch, sample, stream, column) and on nothing else: not on the worker,
nor on the batch that contains the sample, nor on the numbers that other operations draw. The hash
is the finalizer of splitmix64, and a row is the sequence of splitmix64 that starts at the sample's
bits. A whole batch therefore costs a dozen numpy calls; a `numpy.random.Generator` per sample would
cost ten microseconds each. `generator` returns one for a user's function, with the same key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from allstep.data.random.keys import digest, mixed

Floats = NDArray[np.float64]

# The increment of splitmix64: odd, and its bits look random.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of one batch: row i belongs to `samples[i]`.

    `parameters` holds one table (n, k) per operation of a transform: the parameters that the
    operation computed from its random numbers.
    """

    seed: int
    epoch: int
    samples: NDArray[np.int64]
    parameters: tuple[Floats, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def uniform(self, stream: str, columns: int) -> Floats:
        """Return numbers in [0, 1), shape (n, columns), that differ from epoch to epoch."""
        return _uniform(self._bits(stream, "epoch", self.seed, self.epoch), columns)

    def lasting(self, stream: str, columns: int) -> Floats:
        """Return numbers in [0, 1), shape (n, columns), that are equal in all epochs of a run."""
        return _uniform(self._bits(stream, "run", self.seed), columns)

    def generator(self, row: int, stream: str) -> np.random.Generator:
        """Return a new generator for one sample, always in its initial state."""
        bits = self.take([row])._bits(stream, "generator", self.seed, self.epoch)
        return np.random.Generator(np.random.Philox(key=int(bits[0])))

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "Draws":
        """Return the draws of some rows, for a batch from which a bad sample was removed."""
        parameters = tuple(table[rows] for table in self.parameters)
        return replace(self, samples=self.samples[rows], parameters=parameters)

    def _bits(self, stream: str, *key: int | str) -> NDArray[np.uint64]:
        """Return 64 bits for each sample, from the stream and the key."""
        own = mixed(self.samples.astype(np.uint64) * _GOLDEN ^ _key(*key))
        return mixed(own + _key(stream))


def _uniform(bits: NDArray[np.uint64], columns: int) -> Floats:
    """Return the first `columns` numbers of splitmix64 from each row's bits on.

    A double holds the upper 53 of the 64 bits.
    """
    steps = np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN
    return np.ldexp((mixed(bits[:, None] + steps) >> np.uint64(11)).astype(np.float64), -53)


@lru_cache(maxsize=256)
def _key(*parts: int | str) -> np.uint64:
    return np.uint64(int.from_bytes(digest(parts, 8), "little"))
