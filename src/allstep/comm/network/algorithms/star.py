"""Star: all send to rank 0, which adds and sends the result to all.

This is the pattern of a parameter server with one server.

```
   1   2   3   4              1   2   3   4
    \\  \\  /  /                ^   ^   ^   ^
     v  v  v  v                 \\  \\  /  /
         0     adds                 0     sends the sum
```

The simplest algorithm, and the reference for the others: rank 0's link carries every tensor twice,
so the time grows with the number of ranks while the ring's stays constant. Good for two ranks and
tiny tensors. Rank 0 adds in the order of ranks, so all ranks get the bits that one process would
compute.

Cost: p-1 messages arrive one after the other, each added while the next one arrives; then p-1
messages are sent.

    move = alpha + n beta, add = n gamma:    move + add + (p-2) max(move, add) + (p-1) move
"""

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
    if exchange.rank == 0:
        _serve(exchange, flat, combine)
    else:
        # Into the tensor that we send: the result includes it, so it cannot arrive before it was
        # read.
        result = exchange.recv(flat, 0)
        wait_for([exchange.send(flat, 0), result])


def _serve(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    others = range(1, exchange.size)
    for _, data in received(exchange, (Message(peer, flat) for peer in others)):
        combine(flat, data, out=flat)
    wait_for([exchange.send(flat, peer) for peer in others])
