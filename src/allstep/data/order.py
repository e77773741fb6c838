"""Which rank reads which samples: pure functions from positions to sample numbers.

Nothing is stored, and the order of the samples does not depend on the number of workers, so a run
resumes at any position, with any number of workers, without delay.

**The order of an epoch** is a permutation of 0..n-1 that is computed, not stored:
`permute(positions, n, key)` takes constant time per position. A Feistel network
(https://en.wikipedia.org/wiki/Feistel_cipher) cuts a number of b bits into two halves and, round by
round, adds a keyed hash of one half to the other. Each round is invertible, so all rounds together
are a permutation of 0..2^b-1. A result of n or more goes through the network again until it is
below n ("cycle walking"), which leaves a permutation of 0..n-1. b is the smallest sufficient number
of bits, but at least 2, so 2^b < 2n from n = 3 on: on average a number takes at most two passes.

**The validation split.** `held_out` and `kept` divide the training samples of a dataset by another
permutation. It has a seed of its own, so that runs with different seeds train and validate on the
same samples.

**A part of the training split.** `some_first` chooses its samples by a third permutation, with the
seed of the splits: of two parts, the smaller one is a subset of the larger.

**The batches.** `spans` cuts a run into global batches. None spans two epochs, so the last batch of
an epoch may be smaller.

```
run       | epoch 0                       | epoch 1                       |
position  0        batch     2 batch ...  n                               2n
batch     |--------|--------|--------|----|--------|--------|--------|----|
rank      |0  |1   |0  |1   |0  |1   |0|1 |
```

**The shares.** `share` cuts a global batch of c samples into one contiguous range of positions per
rank, in proportion to integer weights: rank r has c x W[r] // W[n] to c x W[r+1] // W[n], where
W[r] is the sum of the weights before r. With even weights the lengths differ by at most one sample.
Some shares may be empty. The weights decide which rank reads a sample, not when it is read. The
partition decides which samples are at a rank's positions:

    share    All ranks use one permutation. Together they read every sample once per epoch, in the
             same order for any number of ranks.
    whole    Each rank has its own permutation of the whole dataset. An epoch may read a sample
             several times or not at all.

`plan` combines both: it yields what one rank reads, batch by batch.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, islice, pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allstep.data.random.random_keys import digest, mixed
from allstep.errors import ConfigError

Numbers = NDArray[np.int64]
Partition = Literal["share", "whole"]
Weights = tuple[int, ...]
"""One positive number per rank: the parts of a global batch that the ranks have."""

MAX_WEIGHT = 1 << 20
"""Largest weight of a share; its product with a number of samples has 64 bits."""
# Rounds of the Feistel network. Even, so that both halves end with their initial widths. 4 suffice
# in theory; halves of few bits need 8.
_ROUNDS = 8
# Batches whose sample numbers are computed together: for a small share, the overhead of a numpy
# call exceeds the arithmetic.
_BATCHES_PER_CALL = 32


class Span(NamedTuple):
    """A global batch: the samples at positions `start` to `stop` (exclusive) of an epoch's order.

    `position` is the number of samples of the run that precede it.
    """

    epoch: int
    start: int
    stop: int
    position: int

    @property
    def end(self) -> int:
        """Return the position of the run after this batch."""
        return self.position + self.stop - self.start


class Reader(NamedTuple):
    """A rank that reads samples: rank `rank` of `size`, in a run over `n` samples.

    `seed` keys the order of the samples; None keeps the order of the dataset. `weights` are those
    of the shares; empty: even ones.
    """

    n: int
    seed: int | None
    rank: int = 0
    size: int = 1
    partition: Partition = "share"
    weights: Weights = ()


def spans(position: int, stop: int, n: int, batch: int) -> Iterator[Span]:
    """Yield the global batches of a run over n samples, from `position` to `stop`."""
    while n and position < stop:
        epoch, start = divmod(position, n)
        span = Span(epoch, start, min(n, start + batch, start + stop - position), position)
        yield span
        position = span.end


def plan(reader: Reader, position: int, stop: int, batch: int) -> Iterator[tuple[Span, Numbers]]:
    """Yield each global batch from `position` to `stop`, and the numbers of the reader's samples.

    `batch` is the size of a global batch in samples.
    """
    for _, same in groupby(spans(position, stop, reader.n, batch), key=lambda span: span.epoch):
        while batches := list(islice(same, _BATCHES_PER_CALL)):
            yield from zip(batches, shares(reader, batches), strict=True)


def shares(reader: Reader, batches: Sequence[Span]) -> list[Numbers]:
    """Return the sample numbers of `reader` in each of `batches`, which belong to one epoch."""
    mine = [_positions(span, reader) for span in batches]
    numbers = _numbers(reader, batches[0].epoch, np.concatenate(mine))
    return np.split(numbers, np.cumsum([len(positions) for positions in mine])[:-1])


def _positions(span: Span, reader: Reader) -> Numbers:
    weights = reader.weights or even(reader.size)
    mine = share(span.stop - span.start, reader.rank, weights)
    return np.arange(span.start + mine.start, span.start + mine.stop)


def _numbers(reader: Reader, epoch: int, positions: Numbers) -> Numbers:
    if reader.seed is None:
        return positions
    if reader.partition == "whole":
        return permute(positions, reader.n, "whole", reader.seed, epoch, reader.rank)
    return epoch_order(positions, reader.n, reader.seed, epoch)


def permute(positions: Numbers, n: int, *key: int | str) -> Numbers:
    """Return the numbers at `positions` (each in 0..n-1) of the permutation of 0..n-1 for `key`."""
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
    """Return the sample numbers at `positions` of epoch number `epoch` in a run with `seed`."""
    return permute(positions, n, "epoch", seed, epoch)


def kept(positions: Numbers, n: int, validation: int, split_seed: int) -> Numbers:
    """Return the numbers, among all n, of the training samples at `positions`.

    Positions are 0..n-validation-1, where `validation` is the number of samples held out.
    """
    _check_split(n, validation)
    return permute(positions, n, "split", split_seed)


def held_out(n: int, validation: int, split_seed: int) -> Numbers:
    """Return the numbers, among all n, of the `validation` samples that are held out."""
    _check_split(n, validation)
    return permute(np.arange(n - validation, n), n, "split", split_seed)


def some_first(count: int, n: int, split_seed: int) -> Numbers:
    """Return, in rising order, the numbers of `count` of n samples; fewer would be among them."""
    return np.sort(permute(np.arange(count), n, "use", split_seed))


def default_validation(n: int) -> int:
    """Return how many of n training samples are held out by default: 5,000, or n/10 if smaller."""
    return min(5000, n // 10)


def even(size: int) -> Weights:
    """Return the weights of `size` ranks with equal shares."""
    return (1,) * size


def share(count: int, rank: int, weights: Weights) -> slice:
    """Return the range of a batch of `count` samples that `rank` computes; it may be empty."""
    before, total = sum(weights[:rank]), sum(weights)
    return slice(count * before // total, count * (before + weights[rank]) // total)


def lengths(count: int, weights: Weights) -> list[int]:
    """Return the number of samples of each rank in a batch of `count` samples."""
    total = sum(weights)
    ends = [count * part // total for part in accumulate(weights, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


def check_weights(weights: Sequence[int], size: int) -> Weights:
    """Return the weights of `size` ranks. Raise ConfigError unless each rank has a valid one."""
    whole = all(isinstance(each, int | np.integer) and each is not True for each in weights)
    if not whole or len(weights) != size or not all(0 < each <= MAX_WEIGHT for each in weights):
        ranks = f"each of {size} workers" if size > 1 else "the only worker"
        raise ConfigError(
            f"shares={list(weights)}: expected one whole number from 1 to {MAX_WEIGHT:,} for"
            f" {ranks}"
        )
    return tuple(map(int, weights))


def some_of(numbers: Sequence[int] | Numbers, n: int) -> Numbers:
    """Return the sample numbers that a user selected from n samples, as an array.

    Raise ConfigError unless they are a list of integers in 0..n-1.
    """
    given = np.asarray(numbers)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        hint = "; np.flatnonzero converts a mask" if given.dtype.kind == "b" else ""
        found = f"found a {given.dtype} array of shape {given.shape}"
        raise ConfigError(f"numbers: expected a list of sample numbers, {found}{hint}")
    if given.size and not (given.min() >= 0 and given.max() < n):
        found = f"found {given.min()} to {given.max()}"
        raise ConfigError(f"numbers: expected sample numbers 0 to {n - 1}, {found}")
    return given.astype(np.int64)


def _check_split(n: int, validation: int) -> None:
    if not 0 <= validation <= n:
        raise ValueError(f"cannot hold out {validation} of {n} samples")


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    return np.frombuffer(digest(key, 8 * _ROUNDS), dtype="<u8").astype(np.uint64)


def _feistel(
    numbers: NDArray[np.uint64], bits: int, round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Return `numbers` under the permutation of 0..2^bits-1 that the round keys define.

    With an odd number of bits, the halves have different widths and swap them in each round.
    """
    low_bits, high_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    for round_key in round_keys:
        low, high = numbers & _ones(low_bits), numbers >> low_bits
        moved = high + (mixed(low ^ round_key) >> (np.uint64(64) - high_bits))
        numbers = (low << high_bits) | (moved & _ones(high_bits))
        low_bits, high_bits = high_bits, low_bits
    return numbers


def _ones(bits: np.uint64) -> np.uint64:
    """Return the number with the lowest `bits` bits set."""
    return (np.uint64(1) << bits) - np.uint64(1)
