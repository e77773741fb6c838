"""Butterfly: ranks exchange halves, then quarters, then eighths, and back.

It sends as few bytes as the ring, in as few rounds as the tree.

Eight ranks, positions 0 to 7; `=` joins two that exchange:

```
round 1     0=4  1=5  2=6  3=7      each sends the half that the other keeps, and adds what it
                                    receives to the half that it keeps itself
round 2     0=2  1=3  4=6  5=7      the same with the quarters of that half
round 3     0=1  2=3  4=5  6=7      and with the eighths: each position now has one finished eighth,
                                    that of its own number
round 4     0=1  2=3  4=5  6=7      each sends all that it has finished, and has twice as much after
                                    each round
round 5     0=2  1=3  4=6  5=7
round 6     0=4  1=5  2=6  3=7
```

Drawn with lines between the rounds this is the butterfly of the fast Fourier transform. Each eighth
is summed on one rank and then only copied: all ranks get the same bits.

The algorithm needs a power of two. Of p = q + extra ranks (q the largest power of two in p) the
first 2 * extra therefore fold into pairs: the odd rank sends its tensor to the even one before it,
waits, and receives the result at the end:

```
p = 5       1 --> 0      positions 0 1 2 3 are ranks 0 2 3 4      butterfly of 4      0 --> 1
```

Cost: log2 q rounds down and up; round i moves n/2^i bytes. Folding adds two messages of the whole
tensor and one sum of it.

    2 log2 q alpha + 2 (q-1)/q n beta + (q-1)/q n gamma
    [+ 2 (alpha + n beta) + n gamma  if p is no power of two]

Each round waits for its sums: for large tensors the ring, which overlaps them, is better.
"""

from torch import Tensor

from allstep.comm.network.algorithms.point_to_point import (
    Combine,
    Exchange,
    Message,
    received,
    wait_for,
)
from allstep.costs.allreduce import power_of_two


def run(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """Reduce `flat`, contiguous and one-dimensional, in place."""
    rank, extra = exchange.rank, exchange.size - power_of_two(exchange.size)
    if rank >= 2 * extra:
        _halve_and_double(exchange, flat, combine)
    elif rank % 2:
        # The result includes our values, so it cannot arrive before they were read.
        _swap(exchange, rank - 1, flat, flat)
    else:
        _swap(exchange, rank + 1, flat[:0], flat, combine)
        _halve_and_double(exchange, flat, combine)
        _swap(exchange, rank + 1, flat, flat[:0])


def _halve_and_double(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """Run the butterfly on a rank that has a position."""
    size = power_of_two(exchange.size)
    extra = exchange.size - size
    position = exchange.rank // 2 if exchange.rank < 2 * extra else exchange.rank - extra
    bounds = [flat.numel() * part // size for part in range(size + 1)]
    distances = [1 << bit for bit in range(size.bit_length() - 1)]
    for distance in reversed(distances):
        own, other = _spans(flat, bounds, position, distance)
        _swap(exchange, _rank_at(position ^ distance, extra), other, own, combine)
    for distance in distances:
        own, other = _spans(flat, bounds, position, distance)
        _swap(exchange, _rank_at(position ^ distance, extra), own, other)


def _rank_at(position: int, extra: int) -> int:
    return 2 * position if position < extra else position + extra


def _spans(flat: Tensor, bounds: list[int], position: int, distance: int) -> tuple[Tensor, Tensor]:
    """Return our side and the peer's side of the range that we share at this distance."""
    ours = position // distance * distance
    theirs = ours ^ distance
    own = flat[bounds[ours] : bounds[ours + distance]]
    other = flat[bounds[theirs] : bounds[theirs + distance]]
    return own, other


def _swap(
    exchange: Exchange, peer: int, outgoing: Tensor, place: Tensor, combine: Combine | None = None
) -> None:
    """Send `outgoing`, and receive `place`: combined with its values, or instead of them.

    Either may be empty.
    """
    coming = received(
        exchange, [Message(peer, place, direct=combine is None)] if place.numel() else []
    )
    sent = [exchange.send(outgoing, peer)] if outgoing.numel() else []
    for _, data in coming:
        if combine is not None:
            combine(place, data, out=place)
    wait_for(sent)
