"""Ring: each rank sends only to the next one, and sends 2 (p-1)/p of the tensor, the least that is
possible. Best for large tensors.

The tensor is cut into p chunks, one for each rank. Four ranks; `c0` to `c3` are chunks, `+` counts
the ranks whose values are in it:

```
            rank 0 ---> rank 1 ---> rank 2 ---> rank 3 ---> rank 0
step 0      c0 --->     c1 --->     c2 --->     c3 --->             what arrives is added to the own
chunk of that number step 1      c3+ --->    c0+ --->    c1+ --->    c2+ ---> step 2      c2++ -->
c3++ -->    c0++ -->    c1++ -->
            c1 done     c2 done     c3 done     c0 done             reduce-scatter ends: each rank
            has one finished chunk
step 3      c1 --->     c2 --->     c3 --->     c0 --->             what arrives is finished, and is
only passed on step 4      c0 --->     c1 --->     c2 --->     c3 ---> step 5      c3 --->     c0
--->     c1 --->     c2 --->             allgather ends: each rank has them all ```

In each of the 2(p-1) steps rank r sends chunk r - step and receives chunk r - step - 1: it always
passes on what it has just received. A finished chunk was summed once, along one way around the
ring, and then only copied: all ranks get the same bits.

Chunks travel in segments. A segment is passed on as soon as it has been added, while the next ones
are still coming in, so the wire does not wait for the adding.

Cost, with chunks of b = n/p bytes in s segments, the first of f bytes. Either the wire sets the
pace: 2(p-1) steps of `s alpha + b beta`, and in the first half of them one segment's adding that
nothing hides. Or adding does: p-1 chunks, after which the last of them is all but sent.

    max(  (p-1) (2 wire + add(f)),    (p-1) add(b) + (p-2) wire + 2 move(f)  )        wire = s alpha
    + b beta

For large n this is 2 (p-1)/p n beta. With more than one segment it is a little too much: a step can
hide all its adding behind the segments of the step before.
"""

from collections.abc import Iterator, Sequence
from math import ceil

import torch
from torch import Tensor

from allstep.comm.network.algorithms.exchange import Combine, Exchange, Message, received, wait_for
from allstep.comm.network.algorithms.speed import Speed

SEGMENT = 1 << 20  # bytes: smaller ones cost more messages and gained nothing at 1 Gbit/s
AHEAD = 4  # segments whose receives are posted


def run(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """All-reduce `flat`, contiguous and one-dimensional, in place."""
    rank, size = exchange.rank, exchange.size
    if size == 1:
        return
    chunks = [segments(chunk) for chunk in flat.tensor_split(size)]
    right, last_step = (rank + 1) % size, 2 * (size - 1) - 1
    steps = _steps(exchange, chunks)
    sent = [exchange.send(segment, right) for segment in chunks[rank]]
    for step, (message, data) in steps:
        if not message.direct:
            combine(message.place, data, out=message.place)
        if step < last_step:
            sent.append(exchange.send(message.place, right))
    wait_for(sent)


def _steps(
    exchange: Exchange, chunks: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[int, tuple[Message, Tensor]]]:
    """Every segment that comes from the left, with the step to which it belongs.

    The first half is to be added.
    """
    rank, size = exchange.rank, exchange.size
    left = (rank - 1) % size
    coming = [
        (step, Message(left, segment, direct=step >= size - 1))
        for step in range(2 * (size - 1))
        for segment in chunks[(rank - step - 1) % size]
    ]
    arrived = received(exchange, [message for _, message in coming], AHEAD)
    return zip((step for step, _ in coming), arrived, strict=True)


def segments(chunk: Tensor) -> Sequence[Tensor]:
    """Views of at most SEGMENT bytes; none of an empty chunk."""
    return torch.split(chunk, max(1, SEGMENT // chunk.element_size())) if chunk.numel() else ()


def cost(num_ranks: int, nbytes: float, speed: Speed) -> float:
    """Seconds."""
    chunk = nbytes / num_ranks
    return pipelined(num_ranks, chunk, ceil(chunk / SEGMENT), min(chunk, SEGMENT), speed)


def pipelined(num_ranks: int, chunk: float, num_segments: int, first: float, speed: Speed) -> float:
    """Seconds of a ring whose chunks travel in so many segments, the first of so many bytes."""
    if num_ranks == 1 or not chunk:
        return 0.0
    wire = num_segments * speed.latency + chunk / speed.bandwidth
    of_wire = (num_ranks - 1) * (2 * wire + speed.combining(first))
    of_adding = (
        (num_ranks - 1) * speed.combining(chunk) + (num_ranks - 2) * wire + 2 * speed.moving(first)
    )
    return max(of_wire, of_adding)
