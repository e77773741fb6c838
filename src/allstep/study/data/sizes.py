"""The sizes of a data study: `--sizes 1/64,1/32,...,1` as numbers of training samples.

Sizes are fractions of the training split or counts, as in `data.use`. "..." continues the two sizes
before it by their ratio up to the size after it.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from allstep.errors import ConfigError, cut
from allstep.study.data.learning_curve import MIN_SIZES
from allstep.train.config.part_of_data import num_in_part, parse_part

_DOTS = "..."
_MOST = 100
"""Most sizes: each is a run per seed."""


def parse_sizes(text: str, whole: int, batch: int) -> list[int]:
    """Return the sizes in rising order. Raise ConfigError unless they make a curve.

    `whole` is the number of training samples, `batch` the fewest that a run can have.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    parts = list(_expanded(items, whole))
    sizes = sorted({num_in_part(part, whole) for part in parts})
    if len(sizes) < MIN_SIZES:
        raise ConfigError(
            f"--sizes: a curve needs at least {MIN_SIZES} sizes, found {len(sizes)} in"
            f" {cut(repr(text))}; add smaller ones"
        )
    if sizes[-1] > whole:
        raise ConfigError(
            f"--sizes: expected at most all {whole} training samples, found {sizes[-1]}"
        )
    if sizes[0] < batch:
        raise ConfigError(
            f"--sizes: the smallest size has {sizes[0]} of {whole} training samples, fewer than a"
            f" batch of {batch}; give sizes from {batch} on, or a smaller batch"
        )
    return sizes


def _expanded(items: Sequence[str], whole: int) -> Iterator[int | Fraction]:
    for i, item in enumerate(items):
        if item != _DOTS:
            yield _part(item)
        elif i < 2 or i + 1 == len(items) or _DOTS in (items[i - 1], items[i - 2], items[i + 1]):
            raise ConfigError("--sizes: expected two sizes before '...' and one after it")
        else:
            around = (items[i - 2], items[i - 1], items[i + 1])
            yield from _between(*(_fraction(_part(each), whole) for each in around))


def _part(item: str) -> int | Fraction:
    try:
        return parse_part(item)
    except ValueError as error:
        raise ConfigError(f"--sizes: {cut(str(error))}") from error


def _fraction(part: int | Fraction, whole: int) -> Fraction:
    return Fraction(part, whole) if isinstance(part, int) else part


def _between(first: Fraction, second: Fraction, last: Fraction) -> Iterator[Fraction]:
    """Yield the sizes after `second`, each as far from the one before, below `last`."""
    ratio = second / first
    if not 1 < ratio <= last / second:
        raise ConfigError("--sizes: expected rising sizes around '...', such as 1/64,1/32,...,1")
    for _ in range(_MOST):
        second *= ratio
        if second >= last:
            return
        yield second
    raise ConfigError(f"--sizes: more than {_MOST} sizes between those around '...'")
