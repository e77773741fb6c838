"""Tree: sums go up a binomial tree to rank 0, the result goes down. Best for small tensors.

It needs few messages, each with the whole tensor. Eight ranks; each arrow is one message:

```
round 1     0 <-- 1    2 <-- 3    4 <-- 5    6 <-- 7        reduce: the receiver adds
round 2     0 <------- 2          4 <------- 6
round 3     0 <--------------------- 4
                                                            rank 0 has the sum
round 4     0 ---------------------> 4
round 5     0 -------> 2          4 -------> 6              broadcast: the same arrows, backwards
round 6     0 --> 1    2 --> 3    4 --> 5    6 --> 7
```

The parent of a rank is its number without the lowest set bit; 6 = 110 has parent 4 = 100, and 4 has
parent 0. If the number of ranks is no power of two, some arrows are missing. One rank computes the
sum, so all get the same bits.

Cost: ceil(log2 p) rounds up, each one message and one sum of n bytes; the same number of rounds
down.

    ceil(log2 p) (2 (alpha + n beta) + n gamma)

Each round moves whole tensors, so cutting large ones does not help: the ring moves log2 p times
less.
"""

from collections.abc import Iterator

from torch import Tensor

from allstep.comm.network.algorithms.point_to_point import (
    Combine,
    Exchange,
    Message,
    received,
    wait_for,
)


def run(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """Reduce `flat`, contiguous and one-dimensional, in place."""
    if exchange.size == 1 or not flat.numel():
        return
    children = list(children_of(exchange.rank, exchange.size))
    for _, data in received(exchange, (Message(child, flat) for child in children)):
        combine(flat, data, out=flat)
    if exchange.rank:
        parent = exchange.rank & (exchange.rank - 1)
        # Into the tensor that we send: the result includes it, so it cannot arrive before it was
        # read.
        result = exchange.recv(flat, parent)
        wait_for([exchange.send(flat, parent), result])
    # The child with the most ranks below it first.
    wait_for([exchange.send(flat, child) for child in reversed(children)])


def children_of(rank: int, size: int) -> Iterator[int]:
    """Yield the ranks that send to `rank`, in the order of the rounds."""
    bit = 1
    while not rank & bit and rank + bit < size:
        yield rank + bit
        bit *= 2
