"""Who changes the weights, once the gradients have been brought together.

```
protocol             Update, what the optimizer asks of any of them; EveryRank: each rank updates all of its own weights
by_owners            ByOwners: one copy of the weights per host, each rank updates what it owns
shared_parameters    that copy
shared_state         the optimizer's state of it
trust_ratios         ratios of layers that other ranks have updated
(servers)            to come: a server has updated them already
```

May import: `parallel.exchange`, `comm` and below. Start with `update`.
"""

from allstep.parallel.updates.by_owners import ByOwners
from allstep.parallel.updates.update import EveryRank, Update

__all__ = ["ByOwners", "EveryRank", "Update"]
