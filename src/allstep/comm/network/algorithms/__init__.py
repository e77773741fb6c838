"""Ways to sum a tensor over many ranks, each with its procedure and what it costs.

```
             messages of the busiest rank   bytes that it sends       good for
tree         log2 p                         n log2 p                  small tensors ring         2
(p-1), more in segments      2 (p-1)/p n               large ones butterfly    2 log2 p  (+1 when
folded)     2 (p-1)/p n  (+n)         those between, p a power of two star         p-1
(p-1) n                   two ranks; a yardstick native       Gloo's ring                    2
(p-1)/p n               a yardstick ```

`choose` takes the one whose formula gives the least time on a measured link. One record holds
procedure and formula, so what runs and what a planner predicts cannot drift apart. A new algorithm
is one file and one line below.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from allstep.comm.network.algorithms import butterfly, native, ring, star, tree
from allstep.comm.network.algorithms.exchange import Combine, Exchange, GlooExchange, GlooLink
from allstep.comm.network.algorithms.measure import measure_speed
from allstep.comm.network.algorithms.speed import Speed
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
    """A way to all-reduce."""

    name: str
    run: Callable[
        [Exchange, Tensor, Combine], None
    ]  # in place; `flat` is contiguous, one-dimensional, equally long on all ranks
    cost: Callable[[int, float, Speed], float]  # seconds, of (num_ranks, nbytes, speed)


ALGORITHMS = {  # of those that cost about the same, the first is taken: fewest messages first
    "tree": Algorithm("tree", tree.run, tree.cost),
    "ring": Algorithm("ring", ring.run, ring.cost),
    "butterfly": Algorithm("butterfly", butterfly.run, butterfly.cost),
    "star": Algorithm("star", star.run, star.cost),
    "native": Algorithm("native", native.run, native.cost),
}
ABOUT = 1.05  # a formula is not more exact than that


def choose(num_ranks: int, nbytes: float, speed: Speed) -> Algorithm:
    """The first in the table whose cost is the least, or within 5 % of it."""
    costs = {
        name: algorithm.cost(num_ranks, nbytes, speed) for name, algorithm in ALGORITHMS.items()
    }
    least = min(costs.values())
    return next(ALGORITHMS[name] for name, cost in costs.items() if cost <= ABOUT * least)


def wanted_algorithm(name: str | None = None) -> Algorithm | None:
    """The one that the user asks for, by argument or else by ALLSTEP_ALGORITHM.

    None: "auto", or nothing said.
    """
    source = "algorithm" if name else VARIABLE
    name = name or os.environ.get(VARIABLE) or "auto"
    if name == "auto":
        return None
    if name not in ALGORITHMS:
        raise ConfigError(
            f"{source}={name!r} is no algorithm: {did_you_mean(name, [*ALGORITHMS, 'auto'])}"
        )
    return ALGORITHMS[name]
