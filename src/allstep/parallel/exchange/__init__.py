"""How the gradients of all ranks become the gradients of the step: one protocol, several ways.

```
protocol         Exchange, what an optimizer asks of any of them; Rule; Listener (a timeline)
bucketed         what AllReduce and Owners share: the step, the header, norms, buckets
all_reduce       AllReduce: every rank gets the mean of every gradient
owners           Owners: each rank of a host gets the mean of what it updates (with `shared_parameters`)
(servers)        to come: a parameter server takes gradients and hands out weights (`kvstore`)
(averaging)      to come: weights are averaged now and then instead of gradients
(sharded)        to come: states of the optimizer spread over all ranks
```

The caller chooses one and hands it to the optimizer; nothing else in `parallel` asks which it is.

May import: `comm`, `optim` and below. Start with `exchange`, then `bucketed`.
"""

from allstep.parallel.exchange.all_reduce import AllReduce
from allstep.parallel.exchange.exchange import Exchange, Listener, Rule
from allstep.parallel.exchange.owners import Owners
from allstep.parallel.exchange.parameter_order import Named

__all__ = ["AllReduce", "Exchange", "Listener", "Named", "Owners", "Rule"]
