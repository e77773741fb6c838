"""allstep.init() under our own launcher's world: exact places, missing ranks, repeated meetings,
leaving."""

import os
import re
import threading
import time
from pathlib import Path

import pytest

from support.ranks import Ranks


def place() -> tuple:
    import allstep

    world = allstep.init()
    assert allstep.init() is world
    return (
        world.rank,
        world.size,
        world.local_rank,
        world.local_size,
        world.cross_rank,
        world.cross_size,
        world.host,
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_places_on_one_host(ranks: Ranks, num_ranks: int) -> None:
    assert ranks(num_ranks, place) == [
        (rank, num_ranks, rank, num_ranks, 0, 1, "testhost") for rank in range(num_ranks)
    ]


def from_two_threads() -> None:
    import allstep

    worlds: list[object] = []
    threads = [threading.Thread(target=lambda: worlds.append(allstep.init())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(worlds) == 4 and len({id(world) for world in worlds}) == 1
    allstep.shutdown()


def test_threads_that_call_init_at_once_get_one_world(ranks: Ranks) -> None:
    ranks(2, from_two_threads)


def test_places_on_uneven_hosts(ranks: Ranks) -> None:
    assert ranks(3, place, hosts=["a", "b", "b"]) == [
        (0, 3, 0, 1, 0, 2, "a"),
        (1, 3, 0, 2, 1, 2, "b"),
        (2, 3, 1, 2, 0, 1, "b"),
    ]


def test_one_process_is_a_real_group(ranks: Ranks) -> None:
    def alone() -> tuple:
        import torch
        import torch.distributed as dist

        import allstep

        world = allstep.init("none")
        total = torch.ones(3)
        dist.all_reduce(total)
        return world.size, world.launcher, dist.get_backend(), total.tolist()

    assert ranks(1, alone) == [(1, "none", "allstep", [1.0, 1.0, 1.0])]


def test_meet_part_and_meet_again(ranks: Ranks) -> None:
    def again() -> list[float]:
        import threading

        import torch
        import torch.distributed as dist

        import allstep

        sums = []
        for number in range(5):
            world = allstep.init()
            total = torch.tensor([float(world.rank + number)])
            dist.all_reduce(total)
            sums.append(total.item())
            allstep.shutdown()
            assert not dist.is_initialized()
        allstep.shutdown()
        # The threads that serve groups end with the last group, however many come and go.
        left = sorted(thread.name for thread in threading.enumerate())
        assert left == ["MainThread"]
        return sums

    assert ranks(3, again) == [[3.0, 6.0, 9.0, 12.0, 15.0]] * 3


def test_a_rank_that_does_not_turn_up_is_named(ranks: Ranks) -> None:
    def come() -> None:
        import allstep

        if int(os.environ["ALLSTEP_RANK"]) != 2:
            allstep.init()

    began = time.monotonic()
    outcomes = ranks.outcomes(3, come, hosts=["a", "a", "a"], env={"ALLSTEP_START_TIMEOUT": "3"})
    assert time.monotonic() - began < 25
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 0]
    for outcome in outcomes[:2]:
        assert re.search(
            r"WorldError: 1 of 3 ranks did not join within \d+ s: rank 2 on a\.", outcome.output
        )


def test_a_local_size_that_nobody_confirms(ranks: Ranks) -> None:
    def lie() -> None:
        import allstep

        for name in ("ALLSTEP_SIZE", "ALLSTEP_LOCAL_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = "3"
        os.environ["ALLSTEP_START_TIMEOUT"] = "3"
        allstep.init()

    outcomes = ranks.outcomes(2, lie)
    assert all("rank 2 on testhost" in outcome.output for outcome in outcomes)

    def lie_about_the_host() -> None:
        import allstep

        os.environ["ALLSTEP_LOCAL_SIZE"] = "2"
        allstep.init()

    outcomes = ranks.outcomes(2, lie_about_the_host, hosts=["a", "b"])
    assert all(
        "ALLSTEP_LOCAL_SIZE=2), but 1 ranks joined there" in outcome.output for outcome in outcomes
    )


def test_a_group_that_the_script_made_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    def both(path: str) -> bool:
        import torch.distributed as dist

        import allstep

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo", store=dist.FileStore(path, size), rank=rank, world_size=size
        )
        before = dist.distributed_c10d._get_default_group()
        allstep.init()
        same = dist.distributed_c10d._get_default_group() is before
        allstep.shutdown()
        return same and dist.is_initialized()

    assert ranks(2, both, str(tmp_path / "store")) == [True, True]


def test_threads_are_our_share_of_the_cores(ranks: Ranks) -> None:
    def threads(bind: bool, chosen: str = "") -> int:
        import torch

        import allstep

        rank = int(os.environ["ALLSTEP_RANK"])
        cores = sorted(os.sched_getaffinity(0))
        if bind:
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        os.environ.pop("OMP_NUM_THREADS", None)
        if chosen:  # by the agent, as `allstep run` does it
            os.environ |= {"OMP_NUM_THREADS": chosen, "ALLSTEP_THREADS": chosen}
        allstep.init()
        return torch.get_num_threads()

    cores = len(os.sched_getaffinity(0))
    assert ranks(1, threads, False, str(cores + 3)) == [cores], (
        "the agent's number is not the user's"
    )
    assert ranks(2, threads, False) == [max(1, cores // 2)] * 2
    assert ranks(2, threads, True) == [1, 1]
    assert ranks(1, threads, False) == [cores]


def test_a_store_that_is_not_there(ranks: Ranks) -> None:
    def come() -> None:
        import allstep

        os.environ.pop("ALLSTEP_TOKEN")
        allstep.init()

    assert "ALLSTEP_RANK is set but ALLSTEP_TOKEN is not" in ranks.outcomes(1, come)[0].output


def test_torchs_tests_of_a_store(ranks: Ranks) -> None:
    """Every operation that torch calls on a store, through C++ and a prefix, as Gloo and the object
    collectives use it."""

    def use() -> list:
        from datetime import timedelta

        from torch.distributed import DistStoreError, PrefixStore

        from allstep import wire
        from allstep.comm.join.launcher_store import WireStore

        client = wire.Client(
            wire.parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"]
        )
        ours = WireStore(client, timedelta(seconds=5))
        store = PrefixStore("p", ours)
        store.set("a", "1")
        store.append("a", "2")
        store.multi_set(["b", "c"], ["3", "4"])
        found = [
            store.get("a"),
            store.multi_get(["b", "c"]),
            store.add("n", 2),
            store.add("n", 3),
            store.check(["a", "b"]),
        ]
        found += [
            store.compare_set("a", "12", "13"),
            store.delete_key("b"),
            store.check(["b"]),
            store.num_keys(),
        ]
        store.set_timeout(timedelta(seconds=0.1))
        try:
            store.get("never")
        except DistStoreError as error:
            found.append("never" in str(error))
        try:
            store.wait(["a", "missing"], timedelta(seconds=0.1))
        except DistStoreError as error:
            found.append("missing" in str(error))
        return found

    assert ranks(1, use) == [[b"12", [b"3", b"4"], 2, 5, True, b"13", True, False, 3, True, True]]


def test_leaving_with_an_operation_under_way(ranks: Ranks) -> None:
    """A rank that fails while a collective is under way ends at once; torch alone waits for the
    collective's time-out."""

    def fail() -> None:
        import subprocess
        import sys

        code = (
            "import allstep, torch, torch.distributed as dist\n"
            "world = allstep.init()\n"
            "if world.rank == 0:\n"
            "    handle = dist.all_reduce(torch.ones(10), async_op=True)\n"
            "    raise ValueError('stop')\n"
            "import time; time.sleep(600)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        if int(os.environ["ALLSTEP_RANK"]) == 0:
            _, err = process.communicate(timeout=100)
            assert process.returncode == 1, err
            assert "ValueError: stop" in err
        else:
            time.sleep(0.1)

    ranks(2, fail, timeout=120)
