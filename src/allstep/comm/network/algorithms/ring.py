"""Ring: each rank sends only to the next one. Best for large tensors.

A rank sends 2 (p-1)/p of the tensor, which is the minimum.

The tensor is cut into p chunks, one for each rank. Four ranks; `c0` to `c3` are chunks, each `+` is
another rank whose values have been added:

```
            rank 0 ---> rank 1 ---> rank 2 ---> rank 3 ---> rank 0
step 0      c0 --->     c1 --->     c2 --->     c3 --->         a received chunk is added to the
step 1      c3+ --->    c0+ --->    c1+ --->    c2+ --->        own chunk of that number
step 2      c2++ -->    c3++ -->    c0++ -->    c1++ -->
            c1 done     c2 done     c3 done     c0 done         reduce-scatter ends: each rank has
                                                                one finished chunk
step 3      c1 --->     c2 --->     c3 --->     c0 --->         a received chunk is finished, and
step 4      c0 --->     c1 --->     c2 --->     c3 --->         is only passed on
step 5      c3 --->     c0 --->     c1 --->     c2 --->         allgather ends: each rank has all
```

In each of the 2(p-1) steps rank r sends chunk r - step and receives chunk r - step - 1: it always
passes on what it has just received. A finished chunk was summed once, along one path around the
ring, and then only copied: all ranks get the same bits.

Chunks travel in segments. A segment is passed on as soon as it has been added, while the next ones
are still arriving, so the link does not wait for the sums.

Cost, with chunks of b = n/p bytes in s segments, the first of f bytes. Either the link limits:
2(p-1) steps of `s alpha + b beta`, and in the first half of them the sum of one segment that
nothing overlaps. Or the sums limit: p-1 chunks, after which the last of them is almost sent.

    max(  (p-1) (2 wire + add(f)),    (p-1) add(b) + (p-2) wire + 2 move(f)  )
    wire = s alpha + b beta

For large n this is 2 (p-1)/p n beta. With more than one segment it is slightly too high: a step can
overlap all its sums with the segments of the step before.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from allstep.comm.network.algorithms.point_to_point import (
    Combine,
    Exchange,
    Message,
    received,
    wait_for,
)
from allstep.costs import allreduce

# Bytes; smaller segments cost more messages and gained nothing at 1 Gbit/s.
SEGMENT = allreduce.SEGMENT
# Segments whose receives are posted ahead.
AHEAD = 4


def run(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """Reduce `flat`, contiguous and one-dimensional, in place."""
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
    """Return every segment that arrives from the left, with its step, as they arrive.

    Segments of the first half of the steps are to be added.
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
    """Return views of at most SEGMENT bytes; none of an empty chunk."""
    return torch.split(chunk, max(1, SEGMENT // chunk.element_size())) if chunk.numel() else ()
