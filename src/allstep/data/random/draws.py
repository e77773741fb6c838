"""Random numbers that belong to a sample, not to whoever draws them.

```
seed, epoch ---blake2b--> key ---+
                                 |
sample number -------------------+--hash--> the sample's own 64 bits --+--hash--> bits of column 0,
1, 2 ... -> [0, 1)
                                                                       |
stream ("Flip", "Erase:1") ---blake2b--> key --------------------------+
```

A number depends on (seed, epoch, sample, stream, column) and on nothing else: not on the worker,
nor on the batch in which a sample comes, nor on what other operations draw. The hash is the
finaliser of splitmix64, and a row is splitmix64's own sequence from the sample's bits on, so a
whole batch costs a dozen calls of numpy: a `numpy.random.Generator` for each sample would cost ten
microseconds apiece. Who wants one anyway (a user's function) gets it from `generator`, keyed alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from allstep.data.random.keys import digest, mixed

Floats = NDArray[np.float64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's step: odd, and its bits look random


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of one batch: row i belongs to `samples[i]`.

    `parameters` holds what the operations of a transform made of their numbers, one table (n, k)
    for each operation.
    """

    seed: int
    epoch: int
    samples: NDArray[np.int64]
    parameters: tuple[Floats, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def uniform(self, stream: str, columns: int) -> Floats:
        """Numbers in [0, 1), (n, columns), that are new at every epoch."""
        return _uniform(self._bits(stream, "epoch", self.seed, self.epoch), columns)

    def lasting(self, stream: str, columns: int) -> Floats:
        """Numbers in [0, 1), (n, columns), that a sample keeps at all epochs of a run."""
        return _uniform(self._bits(stream, "run", self.seed), columns)

    def generator(self, row: int, stream: str) -> np.random.Generator:
        """A whole generator for one sample, always at its beginning."""
        bits = self.take([row])._bits(stream, "generator", self.seed, self.epoch)
        return np.random.Generator(np.random.Philox(key=int(bits[0])))

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "Draws":
        """The draws of some rows only, as when a bad sample was left out of its batch."""
        parameters = tuple(table[rows] for table in self.parameters)
        return replace(self, samples=self.samples[rows], parameters=parameters)

    def _bits(self, stream: str, *key: int | str) -> NDArray[np.uint64]:
        """64 bits for each sample."""
        own = mixed(self.samples.astype(np.uint64) * _GOLDEN ^ _key(*key))
        return mixed(own + _key(stream))


def _uniform(bits: NDArray[np.uint64], columns: int) -> Floats:
    """splitmix64 from each row's bits on; a double has room for the upper 53 bits."""
    steps = np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN
    return np.ldexp((mixed(bits[:, None] + steps) >> np.uint64(11)).astype(np.float64), -53)


@lru_cache(maxsize=256)
def _key(*parts: int | str) -> np.uint64:
    return np.uint64(int.from_bytes(digest(parts, 8), "little"))
