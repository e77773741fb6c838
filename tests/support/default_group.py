"""Inside a rank of the fixture `ranks`: a default group on backend "allstep", made as a plain
script would make it.

    def work():
        with joined() as (rank, size):
            dist.all_reduce(...)

`ONLY_GLOO=1` in the rank's environment leaves the shared memory out, so that Gloo does what ranks
on several hosts would have it do.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

import allstep.comm.group.backend
from allstep.comm.join.rendezvous import find_store
from allstep.limits import read_limits
from allstep.world import World


@contextmanager
def joined(backend: str = "allstep") -> Iterator[tuple[int, int]]:
    """Our rank and the number of ranks. At the end nobody leaves before all have come there."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if os.environ.get("ONLY_GLOO"):
        allstep.comm.group.backend.join_hosts = lambda *_: None
    world = World.detect()
    meeting = find_store(world, read_limits())
    store = dist.PrefixStore("test", meeting.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
    yield world.rank, world.size
    dist.barrier()
    dist.destroy_process_group()
    meeting.close()
