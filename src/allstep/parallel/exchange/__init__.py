"""How the gradients of all ranks become the gradients of the step: one protocol, several
implementations.

```
exchange         the protocol Exchange, for every optimizer; Rule; Listener (a timeline)
bucketed         the common part of AllReduce and Owners: the step, the header, norms, buckets
all_reduce       AllReduce: every rank gets the mean of every gradient
owners           Owners: each rank of a host gets the mean of what it updates (with
                 `shared_parameters`)
compressed_owners  CompressedOwners: as Owners, and what crosses hosts is encoded
array_list       ArrayList: arrays of another framework, in place or into memory of our own
(servers)        planned: a parameter server takes gradients and returns weights (`kvstore`)
(sharded)        planned: optimizer states distributed over all ranks
```

The caller chooses one and passes it to the optimizer; nothing else in `parallel` depends on which
it is.

May import: `comm`, `optim` and below. Start with `exchange`, then `bucketed`.
"""

from allstep.parallel.exchange.all_reduce import AllReduce
from allstep.parallel.exchange.array_list import ArrayList
from allstep.parallel.exchange.exchange import Exchange, Listener, Rule
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.exchange.parameter_order import Named

__all__ = ["AllReduce", "ArrayList", "Exchange", "Listener", "Named", "Owners", "Rule"]
