"""Keys for random numbers: bits computed from names and integers, equal on every machine.

`digest` computes a key from (seed, epoch, ...); `mixed` hashes integers to which a key was added.
`data.order` uses both to permute samples, `data.random.draws` to draw random numbers.
"""

import operator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def digest(parts: tuple[int | str, ...], nbytes: int) -> bytes:
    """Return `nbytes` bytes that depend on `parts` only.

    numpy's integers count as Python's. Raise TypeError for a part that is neither text nor an
    integer.
    """
    plain = tuple(str(part) if isinstance(part, str) else operator.index(part) for part in parts)
    return blake2b(repr(plain).encode(), digest_size=nbytes).digest()


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `x` hashed by the finalizer of splitmix64 (Steele, Lea, Flood 2014).

    Every input bit changes every output bit. Multiplications overflow intentionally.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
