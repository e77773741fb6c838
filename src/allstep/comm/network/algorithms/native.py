"""Native: the network's own allreduce. Gloo's is a ring written in C++.

```
algorithm            ring, tree, butterfly, star     native
above the line       one thread of Python            nothing
---------------------------------------------------------------- Exchange
below the line       send, recv of Gloo              all_reduce of Gloo
```

It serves as a reference, and needs no thread of ours while it runs. Gloo cuts each rank's chunk
into at least two segments, so that one travels while the other is added, and none is above 1 MB:
for tiny tensors it sends twice as many messages as `ring`.

Cost: the ring's formula with s = 2 ceil(n/p / 2 MB) segments.
"""

from torch import Tensor

from allstep.comm.network.algorithms.point_to_point import Combine, Exchange, HasAllReduce
from allstep.errors import CommError


def run(exchange: Exchange, flat: Tensor, combine: Combine) -> None:
    """Reduce `flat`, contiguous and one-dimensional, in place."""
    if not isinstance(exchange, HasAllReduce):
        raise CommError(
            f"{type(exchange).__name__} has no all-reduce of its own: choose another algorithm than"
            " native",
            rank=exchange.rank,
            op="all_reduce",
        )
    if exchange.size > 1 and flat.numel():
        exchange.all_reduce(flat, combine).wait()
