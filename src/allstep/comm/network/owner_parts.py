"""The two halves of an allreduce over hosts, for tensors whose parts have an owner each.

```
parts            | part 0 | part 1 | part 2 |     part k belongs to rank k
sum_for_owners   every rank sends part k to rank k, which adds what arrives, in the order of ranks
...              the owner changes its part: an update of weights
from_owners      every rank sends its part to all others
```

Both halves together send 2 (p-1)/p n bytes, as a ring does. The additions are those of `star`: the
sums have the bits that one process would compute. Messages have at most 1 MB, so that the next ones
arrive while one is added.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from allstep.comm.network.algorithms.point_to_point import (
    Combine,
    Exchange,
    Handle,
    Message,
    received,
    wait_for,
)

Parts = Sequence[Sequence[Tensor]]
"""By rank: flat, contiguous tensors that it owns; their sizes are the same on all ranks."""

_BLOCK_BYTES = 1 << 20
# Receives that are posted before they are needed.
_AHEAD = 4


def sum_for_owners(exchange: Exchange, parts: Parts, combine: Combine) -> None:
    """Leave the sums over all ranks in this rank's own part; the other parts do not change."""
    own = list(_blocks(parts[exchange.rank]))
    messages = (Message(peer, block) for block in own for peer in _others(exchange))
    arriving = received(exchange, messages, _AHEAD)
    sent = [
        exchange.send(block, peer) for peer in _others(exchange) for block in _blocks(parts[peer])
    ]
    for block in own:
        _add(exchange, block, arriving, combine)
    wait_for(sent)


def _add(
    exchange: Exchange,
    block: Tensor,
    arriving: Iterator[tuple[Message, Tensor]],
    combine: Combine,
) -> None:
    """Add what the others have sent for a block, in the order of ranks."""
    lower: Tensor | None = None
    for peer in _others(exchange):
        _, data = next(arriving)
        if peer > exchange.rank:
            combine(block, data, out=block)
        elif lower is None:
            # A copy: the buffer is used again for a later message.
            lower = data if exchange.rank == 1 else data.clone()
        else:
            combine(lower, data, out=lower)
        if peer == exchange.rank - 1 and lower is not None:
            combine(lower, block, out=block)


def from_owners(exchange: Exchange, parts: Parts) -> None:
    """Receive the parts of all other ranks in place, and send them ours."""
    coming: list[Handle] = [
        exchange.recv(block, peer) for peer in _others(exchange) for block in _blocks(parts[peer])
    ]
    # The same block to all: ranks receive the first blocks at the same time.
    sent = [
        exchange.send(block, peer)
        for block in _blocks(parts[exchange.rank])
        for peer in _others(exchange)
    ]
    wait_for([*coming, *sent])


def _others(exchange: Exchange) -> list[int]:
    return [rank for rank in range(exchange.size) if rank != exchange.rank]


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements in blocks of at most 1 MB; small tensors are not joined."""
    for tensor in tensors:
        if tensor.numel():
            yield from torch.split(tensor, max(1, _BLOCK_BYTES // tensor.element_size()))
