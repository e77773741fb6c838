"""Star: all send to rank 0, which adds and sends the result to all. The parameter server, with one
server.

```
   1   2   3   4              1   2   3   4
    \\  \\  /  /                ^   ^   ^   ^
     v  v  v  v                 \\  \\  /  /
         0     adds                 0     sends the sum
```

The simplest of all, and the yardstick for the others: rank 0's wire carries every tensor twice, so
the time grows with the number of ranks where the ring's stays. Good for two ranks and tiny tensors.
Rank 0 adds in the order of ranks, so the result has the bits that one process would compute, on all
ranks.

Cost: p-1 messages come in one after the other, each added while the next one comes; then p-1
messages go out.

    move = alpha + n beta, add = n gamma:    move + add + (p-2) max(move, add) + (p-1) move
"""

from torch import Tensor

from allstep.comm.network.algorithms.exchange import Combine, Exchange, Message, received, wait_for
from allstep.comm.network.algorithms.speed import Speed


def run(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """All-reduce `flat`, contiguous and one-dimensional, in place."""
    if exchange.size == 1 or not flat.numel():
        return
    if exchange.rank == 0:
        _serve(exchange, flat, combine)
    else:
        result = exchange.recv(
            flat, 0
        )  # into what we send: it holds our part, so it cannot come before that was read
        wait_for([exchange.send(flat, 0), result])


def _serve(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    others = range(1, exchange.size)
    for _, data in received(exchange, (Message(peer, flat) for peer in others)):
        combine(flat, data, out=flat)
    wait_for([exchange.send(flat, peer) for peer in others])


def cost(num_ranks: int, nbytes: float, speed: Speed) -> float:
    """Seconds."""
    if num_ranks == 1 or not nbytes:
        return 0.0
    move, add = speed.moving(nbytes), speed.combining(nbytes)
    return move + add + (num_ranks - 2) * max(move, add) + (num_ranks - 1) * move
