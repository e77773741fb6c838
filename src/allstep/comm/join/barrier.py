"""A barrier that names the ranks which do not come.

torch's `monitored_barrier` belongs to Gloo by name. This one needs nothing but the group's store,
so it works on every backend and tells something even when the collectives are stuck. Each rank
counts its arrivals in the store and leaves a key for this one:

```
allstep/barrier/arrivals/<rank>      how often the rank has come to this group's barrier
allstep/barrier/<n>/<rank>           its n-th arrival, with the name of its host
```

The n-th barrier is passed when all ranks have left their n-th key. An arrival stays, so a rank that
gave up does not put the others out of step: who comes later passes at once, and the next barrier is
the same one for all. Keys of the barrier before are removed by their owners: nobody can still be
waiting for them.
"""

import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allstep.errors import CollectiveTimeout, WorldError
from allstep.limits import read_limits
from allstep.world import World

_PREFIX = "allstep/barrier"


def barrier(timeout: float | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Wait until every rank of the group is here; after `timeout` seconds raise `CollectiveTimeout`
    with the missing ranks.

    timeout: seconds; by default ALLSTEP_TIMEOUT.
    """
    group = group or dist.distributed_c10d._get_default_group()
    seconds = read_limits().timeout if timeout is None else timeout
    ranks = dist.get_process_group_ranks(group)
    wait_for_all(group.get_group_store(), group.rank(), group.size(), seconds, ranks)


def leave_card(store: Store, rank: int) -> None:
    """Tell the group on which host this rank is, for messages about it."""
    store.set(f"{_PREFIX}/host/{rank}", host_name())


def host_name() -> str:
    """Of this rank, as the launcher calls it."""
    try:
        return World.detect().host
    except WorldError:  # whoever makes a group by hand need not have a launcher that makes sense
        return World.alone().host


def wait_for_all(
    store: Store, rank: int, size: int, seconds: float, names: list[int] | None = None
) -> None:
    """The barrier itself, by ranks of the group; `names` are the numbers under which the user knows
    them."""
    number = store.add(f"{_PREFIX}/arrivals/{rank}", 1)
    keys = [f"{_PREFIX}/{number}/{each}" for each in range(size)]
    store.set(keys[rank], host_name())
    began = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise _absent(
                missing, rank, size, names or list(range(size)), store, time.monotonic() - began
            ) from error
        if not isinstance(error, dist.DistStoreError):
            raise
    if number > 1:
        store.delete_key(f"{_PREFIX}/{number - 1}/{rank}")


def _absent(
    missing: list[int], rank: int, size: int, names: list[int], store: Store, seconds: float
) -> CollectiveTimeout:
    who = [f"rank {names[each]} on {_host_of(each, store)}" for each in missing]
    message = (
        f"barrier: {len(missing)} of {size} ranks did not come within {seconds:.1f} s:"
        f" {', '.join(who)}"
    )
    return CollectiveTimeout(
        message, rank=names[rank], op="barrier", peer=names[missing[0]], seconds=seconds
    )


def _host_of(rank: int, store: Store) -> str:
    key = f"{_PREFIX}/host/{rank}"
    return store.get(key).decode() if store.check([key]) else "a host that it did not tell"
