"""The barrier that names who is missing."""

import time

import torch.distributed as dist

import allstep.comm
from allstep.errors import CollectiveTimeout
from support.default_group import joined
from support.ranks import Ranks


def test_all_come(ranks: Ranks) -> None:
    def work() -> int:
        with joined() as (rank, _):
            for number in range(5):
                time.sleep(0.01 * ((rank + number) % 3))
                allstep.comm.barrier(timeout=60)
            odd = dist.new_group([1, 2])
            if rank in (1, 2):
                allstep.comm.barrier(group=odd)
            gloo = dist.new_group(backend="gloo")
            allstep.comm.barrier(60, gloo)
            dist.barrier()
            store = dist.group.WORLD.get_group_store()
            return sum(store.check([f"allstep/barrier/{number}/{rank}"]) for number in range(6))

    assert ranks(3, work) == [1] * 3  # of five barriers the last one's key is left


def test_the_missing_are_named(ranks: Ranks) -> None:
    def work() -> tuple | None:
        with joined() as (rank, _):
            error = None
            group = dist.new_group([1, 2, 3])
            if rank == 1:
                try:
                    allstep.comm.barrier(timeout=0.3, group=group)
                except CollectiveTimeout as caught:
                    error = (
                        str(caught).replace(f"{caught.seconds:.1f}", "T"),
                        caught.rank,
                        caught.peer,
                        caught.op,
                    )
            dist.barrier()
            if rank > 1:  # the late ones find that rank 1 was there, and all are in step again
                allstep.comm.barrier(timeout=60, group=group)
            if rank:
                allstep.comm.barrier(timeout=60, group=group)
            return error

    found = ranks(4, work, hosts=["a", "a", "b", "c"])
    message = "barrier: 2 of 3 ranks did not arrive within T s: rank 2 on b, rank 3 on c"
    assert found == [None, (message, 1, 2, "barrier"), None, None]


def test_under_init(ranks: Ranks) -> None:
    def work() -> None:
        allstep.comm.init()
        allstep.comm.barrier()
        allstep.comm.barrier(timeout=60)

    ranks(2, work)
