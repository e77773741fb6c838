"""Algorithms that sum a tensor over many ranks, each with its procedure and its cost.

```
             messages of the busiest rank   bytes that it sends   good for
tree         log2 p                         n log2 p              small tensors
ring         2 (p-1), more in segments      2 (p-1)/p n           large tensors
butterfly    2 log2 p  (+1 when folded)     2 (p-1)/p n  (+n)     medium tensors, p a power of two
star         p-1                            (p-1) n               two ranks; as a reference
native       Gloo's ring                    2 (p-1)/p n           as a reference
```

`choose` takes the algorithm whose formula gives the least time on a measured link. One record holds
procedure and formula; the formulas are in `allstep.costs`, which the planner uses too, so what runs
and what it predicts cannot drift apart. A new algorithm is one file, one formula and one line
below.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from allstep.comm.network.algorithms import butterfly, native, ring, star, tree
from allstep.comm.network.algorithms.measure_link import measure_speed
from allstep.comm.network.algorithms.point_to_point import Combine, Exchange, GlooExchange, GlooLink
from allstep.costs.allreduce import COSTS, cheapest
from allstep.costs.speed import Speed
from allstep.errors import ConfigError, did_you_mean

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Exchange",
    "GlooExchange",
    "GlooLink",
    "Speed",
    "choose",
    "measure_speed",
    "wanted_algorithm",
]

VARIABLE = "ALLSTEP_ALGORITHM"


@dataclass(frozen=True)
class Algorithm:
    """An allreduce algorithm: how to run it, and its cost."""

    name: str
    run: Callable[[Exchange, Tensor, Combine], None]
    """Reduce a contiguous, one-dimensional tensor in place, of the same length on all ranks."""
    cost: Callable[[int, float, Speed], float]
    """Return the time in seconds for (num_ranks, nbytes, speed)."""


ALGORITHMS = {
    "tree": Algorithm("tree", tree.run, COSTS["tree"]),
    "ring": Algorithm("ring", ring.run, COSTS["ring"]),
    "butterfly": Algorithm("butterfly", butterfly.run, COSTS["butterfly"]),
    "star": Algorithm("star", star.run, COSTS["star"]),
    "native": Algorithm("native", native.run, COSTS["native"]),
}


def choose(num_ranks: int, nbytes: float, speed: Speed) -> Algorithm:
    """Return the first algorithm in the table whose cost is within 5% of the lowest."""
    return ALGORITHMS[cheapest(num_ranks, nbytes, speed)]


def wanted_algorithm(name: str | None = None) -> Algorithm | None:
    """Return the algorithm that the user requests, by `name` or else by ALLSTEP_ALGORITHM.

    None for "auto", or if neither is set.
    """
    source = "algorithm" if name else VARIABLE
    name = name or os.environ.get(VARIABLE) or "auto"
    if name == "auto":
        return None
    if name not in ALGORITHMS:
        raise ConfigError(
            f"{source}={name!r} is not an algorithm: {did_you_mean(name, [*ALGORITHMS, 'auto'])}"
        )
    return ALGORITHMS[name]
