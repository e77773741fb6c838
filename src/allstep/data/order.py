"""Who reads what: pure functions from positions to sample numbers.

Nothing here is stored and nothing depends on the number of workers, so a run resumes at any
position, at any size, at once.

**The order of an epoch** is a permutation of 0..n-1 that is computed, not drawn up:
`permute(positions, n, key)` answers for any positions in constant time each. A Feistel network
(https://en.wikipedia.org/wiki/Feistel_cipher) cuts a number of b bits into two halves and, round by
round, adds a keyed hash of one half to the other. Each round can be undone, so the whole is a
permutation of 0..2^b-1. A result of n or more is put in again until it falls below n ("cycle
walking"): that leaves a permutation of 0..n-1. b is the least that suffices, but at least 2, so 2^b
< 2n from n = 3 on, and that takes two goes on average at worst.

**The three sets.** `held_out` and `kept` cut the numbers of a training set in two by one more
permutation, keyed by its own seed, so that runs with different seeds train and validate on the same
samples.

**The batches.** `spans` cuts a run into global batches; none spans two epochs, so the last of an
epoch may be smaller.

```
run       | epoch 0                       | epoch 1                       |
position  0        batch     2 batch ...  n                               2n
batch     |--------|--------|--------|----|--------|--------|--------|----|
rank      |0  |1   |0  |1   |0  |1   |0|1 |
```

**The shares.** A global batch of c samples goes to `size` ranks in contiguous pieces (`share`) that
differ by at most one sample. With fewer samples than ranks some shares are empty. Which samples
stand in a rank's piece is the partition's matter:

    share    all ranks cut up one permutation: together they read every sample once an epoch, in the
    same order at any size whole    each rank has a permutation of its own of the whole set and
    reads its pieces of that: no exact cover

`plan` puts the two together: what one rank reads, batch after batch.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allstep.data.random.keys import digest, mixed
from allstep.errors import ConfigError

Numbers = NDArray[np.int64]
Partition = Literal["share", "whole"]

# even, so that the halves end with the widths they began with; 4 suffice in theory, 8 for halves of
# few bits
_ROUNDS = 8
# batches whose sample numbers are computed together: a call of numpy costs more than the numbers of
# a small share
_AT_ONCE = 32


class Span(NamedTuple):
    """A global batch: the samples at `start` to `stop` of the order of an epoch, and how many of
    the run came before."""

    epoch: int
    start: int
    stop: int
    position: int

    @property
    def end(self) -> int:
        """The position after it."""
        return self.position + self.stop - self.start


class Reader(NamedTuple):
    """Whose order it is: rank `rank` of `size`, in a run over `n` samples with `seed` (None: as
    they lie)."""

    n: int
    seed: int | None
    rank: int = 0
    size: int = 1
    partition: Partition = "share"


def spans(position: int, stop: int, n: int, batch: int) -> Iterator[Span]:
    """The global batches of a run over n samples from `position` to `stop`."""
    while n and position < stop:
        epoch, start = divmod(position, n)
        span = Span(epoch, start, min(n, start + batch, start + stop - position), position)
        yield span
        position = span.end


def plan(reader: Reader, position: int, stop: int, batch: int) -> Iterator[tuple[Span, Numbers]]:
    """What `reader` reads from `position` to `stop`: each global batch, and the numbers of its own
    samples in it."""
    for _, same in groupby(spans(position, stop, reader.n, batch), key=lambda span: span.epoch):
        while some := list(islice(same, _AT_ONCE)):
            yield from zip(some, shares(reader, some), strict=True)


def shares(reader: Reader, some: Sequence[Span]) -> list[Numbers]:
    """The samples of `reader` in each of some global batches of one epoch."""
    mine = [_positions(span, reader) for span in some]
    numbers = _numbers(reader, some[0].epoch, np.concatenate(mine))
    return np.split(numbers, np.cumsum([len(positions) for positions in mine])[:-1])


def _positions(span: Span, reader: Reader) -> Numbers:
    mine = share(span.stop - span.start, reader.rank, reader.size)
    return np.arange(span.start + mine.start, span.start + mine.stop)


def _numbers(reader: Reader, epoch: int, positions: Numbers) -> Numbers:
    if reader.seed is None:
        return positions
    if reader.partition == "whole":
        return permute(positions, reader.n, "whole", reader.seed, epoch, reader.rank)
    return epoch_order(positions, reader.n, reader.seed, epoch)


def permute(positions: Numbers, n: int, *key: int | str) -> Numbers:
    """Sample numbers at `positions` (each in 0..n-1) of the permutation of 0..n-1 that `key` names."""
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and (positions.min() < 0 or positions.max() >= n):
        raise IndexError(
            f"positions {positions.min()}..{positions.max()} are not all in 0..{n - 1}"
        )
    round_keys = _round_keys(key)
    bits = max(2, (int(n) - 1).bit_length())
    numbers = _feistel(positions.astype(np.uint64), bits, round_keys)
    while (outside := numbers >= n).any():
        numbers[outside] = _feistel(numbers[outside], bits, round_keys)
    return numbers.astype(np.int64)


def epoch_order(positions: Numbers, n: int, seed: int, epoch: int) -> Numbers:
    """Which of 0..n-1 stand at `positions` of epoch number `epoch` in a run with `seed`."""
    return permute(positions, n, "epoch", seed, epoch)


def kept(positions: Numbers, n: int, validation: int, split_seed: int) -> Numbers:
    """Numbers, among all n, of the training samples at `positions` in 0..n-validation-1."""
    _check_split(n, validation)
    return permute(positions, n, "split", split_seed)


def held_out(n: int, validation: int, split_seed: int) -> Numbers:
    """Numbers, among all n, of the `validation` samples that are held out."""
    _check_split(n, validation)
    return permute(np.arange(n - validation, n), n, "split", split_seed)


def default_validation(n: int) -> int:
    """How many of n training samples are held out when nobody says: 5,000, or a tenth of a small
    set."""
    return min(5000, n // 10)


def share(count: int, rank: int, size: int) -> slice:
    """The piece of a batch of `count` samples that belongs to `rank`; pieces differ by at most one
    sample and may be empty."""
    return slice(rank * count // size, (rank + 1) * count // size)


def some_of(numbers: Sequence[int] | Numbers, n: int) -> Numbers:
    """`numbers` as given by a user who wants only these of n samples; ConfigError when they cannot
    be that."""
    given = np.asarray(numbers)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        hint = "; np.flatnonzero makes numbers of a mask" if given.dtype.kind == "b" else ""
        found = f"a {given.dtype} array of shape {given.shape}"
        raise ConfigError(
            f"numbers is a list of whole numbers, those of samples, not {found}{hint}"
        )
    if given.size and not (given.min() >= 0 and given.max() < n):
        raise ConfigError(
            f"numbers are those of samples, 0 to {n - 1}; these are {given.min()} to {given.max()}"
        )
    return given.astype(np.int64)


def _check_split(n: int, validation: int) -> None:
    if not 0 <= validation <= n:
        raise ValueError(f"cannot hold {validation} of {n} samples out")


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    return np.frombuffer(digest(key, 8 * _ROUNDS), dtype="<u8").astype(np.uint64)


def _feistel(
    numbers: NDArray[np.uint64], bits: int, round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """A permutation of 0..2^bits-1.

    With an odd number of bits the halves have different widths and trade them each round.
    """
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    for round_key in round_keys:
        low, high = numbers & _ones(low_bits), numbers >> low_bits
        moved = high + (mixed(low ^ round_key) >> (np.uint64(64) - high_bits))
        numbers = (low << high_bits) | (moved & _ones(high_bits))
        low_bits, high_bits = high_bits, low_bits
    return numbers


def _ones(bits: np.uint64) -> np.uint64:
    return (np.uint64(1) << bits) - np.uint64(1)
