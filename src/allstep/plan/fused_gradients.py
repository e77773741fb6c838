"""Which gradients are reduced together, and when."""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from allstep.plan.setting import Buckets, Gradient

# Part of a tick by which times may differ through rounding.
_SLACK = 1e-6


class Bucket(NamedTuple):
    """Gradients that are reduced in one operation: their bytes, and when the last is ready."""

    nbytes: float
    ready: float


def buckets_of(gradients: Sequence[Gradient], rule: Buckets) -> Iterator[Bucket]:
    """Yield the buckets of fixed size, the last layer's first.

    A bucket is full when one more gradient would exceed its limit. Gradients are in forward order.
    """
    limit = rule.first or rule.limit
    nbytes, ready, is_open = 0.0, 0.0, False
    for each in reversed(gradients):
        if is_open and nbytes + each.nbytes > limit:
            yield Bucket(nbytes, ready)
            nbytes, ready, limit = 0.0, 0.0, rule.limit
        nbytes, ready, is_open = nbytes + each.nbytes, max(ready, each.ready), True
    if is_open:
        yield Bucket(nbytes, ready)


def by_ticks(
    gradients: Sequence[Gradient],
    rule: Buckets,
    seconds: Callable[[float], float],
    earliest: float = 0.0,
) -> float:
    """Return when the last gradient is reduced if buckets are formed at ticks, as Horovod does.

    At each tick at which the channel is free, all gradients that are ready are reduced in buckets
    of at most `rule.limit` bytes; a backlog thus fuses by itself. No bucket starts before
    `earliest`.
    """
    waiting = sorted(gradients, key=lambda each: each.ready)
    place, end = 0, earliest
    while place < len(waiting):
        free = max(end, waiting[place].ready, earliest)
        tick = ceil(free / rule.tick - _SLACK / 2) * rule.tick
        nbytes, end = 0.0, tick
        while place < len(waiting) and waiting[place].ready <= tick + _SLACK * rule.tick:
            more = waiting[place].nbytes
            if nbytes and nbytes + more > rule.limit:
                end, nbytes = end + seconds(nbytes), 0.0
            nbytes += more
            place += 1
        end += seconds(nbytes)
    return end
