"""Training on weights that the parties of a host share: `sync=async`, `stale`, `clock`, `lazy`,
`elastic`.

```
push_update    PushUpdate: an optimizer's step is a push; share_model makes it
shared_model   SharedModel: rounds, steps, synchronization points, lost parties
replay         the same weights again, in one process, from the order log
model_memory   the shared memory of a model
model_copy     the newest weights and a party's own copy
elastic_copy   a center and a party's own weights, which move toward each other
unit_updates   the optimizer on one unit at a time
whole_state    the optimizer's state of whole parameters, cut to units
gathering      small collectives of the living parties
claims         samples that parties take from one counter
admission      which push has to wait, by mode
order_log      one entry for each push
unit           the lock and version of a unit
party_lines    what each party computes, and how far its push is
layout         parameters in flat memory, cut into units
options        settings
corrections    learning rates and gradients of late pushes
push           plain values: Claim, Push
sync_point     a plain value: SyncPoint
```

A party is a worker of one host; workers on several hosts are refused, as servers between hosts
store keys only so far. Start with `shared_model`, then `claims`.
"""

from allstep.kvstore.training.options import Options
from allstep.kvstore.training.push import Claim, Push
from allstep.kvstore.training.push_update import PushUpdate, share_model
from allstep.kvstore.training.replay import replay
from allstep.kvstore.training.shared_model import SharedModel
from allstep.kvstore.training.sync_point import SyncPoint

__all__ = [
    "Claim",
    "Options",
    "Push",
    "PushUpdate",
    "SharedModel",
    "SyncPoint",
    "replay",
    "share_model",
]
