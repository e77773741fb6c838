"""Which ranks change the weights, once the gradients have been combined.

```
update               the protocol Update, for every optimizer; EveryRank: each rank updates all of
                     its own weights
by_owners            ByOwners: one copy of the weights per host, each rank updates what it owns
shared_parameters    that copy of the weights
shared_state         the optimizer's state for it
undo                 which ranges of both an elastic run restores after a loss within an update
averaging            Averaging: each rank updates its own weights; their mean at intervals
outer_step           what is done with the mean: DiLoCo's outer step; its defaults
flat_tensors         tensors of all ranks in few large buffers, combined in one reduction each
party_states         the optimizer's state of all ranks in one checkpoint
trust_ratios         ratios of layers that other ranks have updated
(servers)            planned: a server has already updated the weights
```

May import: `parallel.exchange`, `comm` and below. Start with `update`.
"""

from allstep.parallel.updates.averaging import Averaging
from allstep.parallel.updates.by_owners import ByOwners
from allstep.parallel.updates.outer_step import OuterStep
from allstep.parallel.updates.update import EveryRank, Update

__all__ = ["Averaging", "ByOwners", "EveryRank", "OuterStep", "Update"]
