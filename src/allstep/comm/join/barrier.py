"""A barrier that names the missing ranks.

torch's `monitored_barrier` exists only for Gloo. This one needs only the group's store, so it works
on every backend, and it reports missing ranks even when the collectives are stuck. Each rank counts
its arrivals in the store and writes a key for each:

```
allstep/barrier/arrivals/<rank>      how often the rank has arrived at this group's barrier
allstep/barrier/<n>/<rank>           its n-th arrival, with the name of its host
```

The n-th barrier is passed when all ranks have written their n-th key. An arrival stays, so a rank
that timed out does not put the others out of step: a rank that arrives later passes at once, and
the next barrier is the same one for all. Each rank removes its key of the previous barrier, for
which no rank can still be waiting.
"""

import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from allstep.errors import CollectiveTimeout, PeerLost, WorldError
from allstep.limits import read_limits
from allstep.world import World

_PREFIX = "allstep/barrier"


def barrier(timeout: float | None = None, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of `group` (default: all ranks) have called this.

    After `timeout` seconds (default: ALLSTEP_TIMEOUT) raise `CollectiveTimeout` with the missing
    ranks.
    """
    group = group or dist.distributed_c10d._get_default_group()
    seconds = read_limits().timeout if timeout is None else timeout
    ranks = dist.get_process_group_ranks(group)
    wait_for_all(group.get_group_store(), group.rank(), group.size(), seconds, ranks)


def leave_card(store: Store, rank: int) -> None:
    """Write the host of this rank to the group's store, for error messages."""
    store.set(f"{_PREFIX}/host/{rank}", host_name())


def host_name() -> str:
    """Return the name of this rank's host, as the launcher calls it."""
    try:
        return World.detect().host
    # A script that makes a group by hand may have a contradictory launcher environment.
    except WorldError:
        return World.alone().host


def wait_for_all(
    store: Store, rank: int, size: int, seconds: float, names: list[int] | None = None
) -> None:
    """Wait until all ranks of a group have arrived, or raise `CollectiveTimeout`.

    `names` are the user's numbers for the ranks of the group.
    """
    number = store.add(f"{_PREFIX}/arrivals/{rank}", 1)
    keys = [f"{_PREFIX}/{number}/{each}" for each in range(size)]
    store.set(keys[rank], host_name())
    began = time.monotonic()
    try:
        store.wait(keys, timedelta(seconds=seconds))
    # The generation has ended.
    except PeerLost:
        raise
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
        f"barrier: {len(missing)} of {size} ranks did not arrive within {seconds:.1f} s:"
        f" {', '.join(who)}"
    )
    return CollectiveTimeout(
        message, rank=names[rank], op="barrier", peer=names[missing[0]], seconds=seconds
    )


def _host_of(rank: int, store: Store) -> str:
    key = f"{_PREFIX}/host/{rank}"
    return store.get(key).decode() if store.check([key]) else "an unknown host"
