"""The samples of claims: positions of a run that this process takes one after the other.

In asynchronous training no rank has a fixed share of a batch. A *claim* is a start and a count:
positions of the run, within one epoch. Which samples are at these positions depends neither on who
claims them nor on when, and neither do the random numbers of their augmentation.

```
claims   (start, count), (start, count), ...   taken ahead of time, as the machinery asks
shares   the samples of one claim each, in the order of the claims
```
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from allstep.data import order
from allstep.data.loading.fill import Recipe
from allstep.data.loading.share import Share, ShareLayout
from allstep.data.order import Numbers, Reader, Span

# Positions whose samples are computed together. The claims of a process are near each other, and a
# call for one claim would cost more than its arithmetic.
_BLOCK = 4096


class ClaimedSamples:
    """The numbers of the samples at positions of a run, whichever rank reads them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = Reader(reader.n, reader.seed)
        self._begin = self._end = 0
        self._numbers: Numbers = np.zeros(0, np.int64)

    def at(self, start: int, count: int) -> tuple[Span, Numbers]:
        """Return the span of a claim, and the numbers of its samples.

        Raise ValueError unless it is within one epoch.
        """
        n = self._reader.n
        epoch, offset = divmod(start, n)
        if not (start >= 0 and 0 < count <= n - offset):
            raise ValueError(
                f"{count} samples from position {start} on are not in one epoch of {n}"
            )
        if not self._begin <= start <= start + count <= self._end:
            self._load(start, max(count, _BLOCK))
        first = start - self._begin
        return Span(epoch, offset, offset + count, start), self._numbers[first : first + count]

    def _load(self, start: int, count: int) -> None:
        """Compute the numbers at `count` positions from `start` on, up to the epoch's end."""
        epoch, offset = divmod(start, self._reader.n)
        span = Span(epoch, offset, min(self._reader.n, offset + count), start)
        (self._numbers,) = order.shares(self._reader, [span])
        self._begin, self._end = start, span.end


def shares_of_claims(
    claims: Iterable[tuple[int, int]],
    reader: Reader,
    named: Callable[[Numbers], Numbers],
    recipe: Recipe,
    layout: ShareLayout,
) -> Iterator[Share]:
    """Yield the share of each claim; a claim is requested when its share is.

    `named` returns the numbers of the source for those of the run.
    """
    samples = ClaimedSamples(reader)
    for start, count in claims:
        span, numbers = samples.at(start, count)
        yield Share(recipe, layout, span, named(numbers))
