"""Keys of what is random: from names and numbers to bits, the same on every machine and for every
kind of integer.

`digest` makes a key of (seed, epoch, ...); `mixed` spreads bits that a key was added to. `order`
permutes with the two and `images.draws` draws with them.
"""

import operator
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def digest(parts: tuple[int | str, ...], nbytes: int) -> bytes:
    """`nbytes` that belong to `parts`. numpy's integers mean the same as Python's; whatever is no
    integer is a TypeError."""
    plain = tuple(str(part) if isinstance(part, str) else operator.index(part) for part in parts)
    return blake2b(repr(plain).encode(), digest_size=nbytes).digest()


def mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit moves every output
    bit. Wraps round on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
