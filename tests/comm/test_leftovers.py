"""From `init` to `shutdown`, many times: no open file, no thread and no map is left behind."""

import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import allstep
import allstep.torch as hvd
from allstep import comm
from allstep.comm.group.init import group_for
from allstep.errors import PeerLost
from conftest import SOAK
from support.generations import Generations, note, run_generations
from support.ranks import Ranks, describe

ROUNDS = 50 if SOAK else 10
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # torch's own pool of threads stays for good
WARM = 4  # rounds after which allocator and imports have all that they need


class Held(NamedTuple):
    """What a process holds."""

    files: list[str]
    threads: list[str]  # those of Python and those of Gloo
    segments: list[str]
    num_maps: int


def held() -> Held:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    tasks = [name_of(task) for task in Path("/proc/self/task").iterdir()]
    assert len(tasks) >= threading.active_count()
    files = [link for fd in os.listdir("/proc/self/fd") if (link := target_of(fd))]
    segments = [without_number(line.split(maxsplit=5)[5]) for line in maps if is_segment(line)]
    return Held(sorted(map(without_number, files)), sorted(tasks), segments, len(maps))


def without_number(path: str) -> str:
    """Return a path without the random number of a segment: others of its kind may replace it."""
    return re.sub(r"allstep-[0-9a-f]{16}", "allstep", path)


def is_segment(line: str) -> bool:
    """Return whether a line of /proc/self/maps is shared memory of ours.

    The path of the project itself may contain the name.
    """
    return "/memfd:allstep" in line or "/dev/shm/allstep" in line


def name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return "gone"


def target_of(fd: str) -> str:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:  # of the listing itself
        return ""


def settled(before: Held) -> Held:
    """What is held once threads that have been asked to end have ended."""
    end = time.monotonic() + 20
    while (now := held())[:3] != before[:3] and time.monotonic() < end:
        time.sleep(0.05)
    return now


def plain_round() -> None:
    world = allstep.init()
    dist.all_reduce(torch.ones(100_000))
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    pair = dist.new_group(list(range(world.size)))
    dist.all_reduce(torch.ones(10), group=pair)
    if world.rank < 2:
        other = torch.ones(3)
        dist.send(other, 1) if world.rank == 0 else dist.recv(other, 0)
    dist.barrier()
    allstep.shutdown()


def hvd_round(model: Any, optimizer: Any) -> Any:
    """With three groups: the engine's, a process set's and that of the gradients."""
    chosen = hvd.ProcessSet([0])
    hvd.init(process_sets=[chosen])
    hvd.allreduce(torch.ones(100))
    hvd.allreduce_async(torch.ones(5), name="later")
    if chosen.included():
        hvd.allreduce(torch.ones(3), process_set=chosen)
    if optimizer is None:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    hvd.barrier()
    hvd.shutdown()
    return optimizer


def both_round(model: Any) -> None:
    """An optimizer of this round alone, with shared weights, in a world that allstep.init() made."""
    allstep.init()
    hvd.init()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, share_weights=True)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    hvd.barrier()
    hvd.shutdown()
    allstep.shutdown()


def many_rounds(rounds: int) -> list[tuple[str, Held, Held, Held]]:
    """For each kind of round what was held before all, after some rounds and after the last."""
    model, optimizer, found = torch.nn.Linear(3, 2), None, []
    before = held()

    def again() -> None:
        nonlocal optimizer
        optimizer = hvd_round(model, optimizer)

    kinds = {
        "allstep.init": plain_round,
        "hvd.init": again,
        "both": lambda: both_round(torch.nn.Linear(3, 2)),
    }
    for name, act in kinds.items():
        for number in range(rounds):
            act()
            if number == WARM - 1:
                warm = settled(before)
        found.append((name, before, warm, settled(before)))
    return found


@pytest.mark.soak(1)  # its count is in the test
@pytest.mark.timeout(1200 if SOAK else 180)
def test_nothing_is_left_after_shutdown(ranks: Ranks) -> None:
    limit = 1000 if SOAK else 150
    results = ranks(2, many_rounds, ROUNDS, timeout=limit, env=ONE_THREAD)
    for rank, found in enumerate(results):
        check(rank, found, ROUNDS)


def check(rank: int, found: list[tuple[str, Held, Held, Held]], rounds: int) -> None:
    for name, before, warm, after in found:
        case = (rank, name)
        assert after.files == before.files, case
        assert after.threads == before.threads, case
        assert after.segments == [], case
        # The allocator's maps come and go a little; one map a round would be more.
        assert after.num_maps - warm.num_maps < max(2, (rounds - WARM) // 2), (
            case,
            warm.num_maps,
            after.num_maps,
        )


NUM_WORLDS = 200 if SOAK else 14


def many_worlds(num_worlds: int) -> tuple[Held, Held]:
    """Rejoin again and again, each time out of a collective that the end of the world breaks.

    Return what is held between two worlds, before the first one and after the last.
    """
    before = held()
    comm.init()
    for number in range(num_worlds):
        try:
            while True:
                dist.all_reduce(torch.ones(1000))
                group_for("test").allreduce([torch.ones(10)]).wait()
                note(f"ran/{number}")
        except PeerLost:
            comm.rejoin(number)
        if number == WARM:
            comm.shutdown()
            warm = settled(before)
            comm.init()
    comm.shutdown()
    return warm, settled(warm)


@pytest.mark.soak(1)  # its count is in the test
@pytest.mark.timeout(1200 if SOAK else 180)
def test_worlds_leave_nothing_behind(ranks: Ranks) -> None:
    """No file, thread or map more in a process after the last world than after the first ones, and
    no key more in the store.
    """
    tickets, num_keys = ["a", "b", "c"], []

    def change(launcher: Generations) -> None:
        for number in range(NUM_WORLDS):
            launcher.form(tickets)
            launcher.wait_for_notes(f"ran/{number}", tickets)
            launcher.store.delete_prefix("ran/")
            num_keys.append(len(launcher.store.keys("")))
            launcher.end(f"world {number} ends")
            if number == WARM:
                launcher.form(tickets)
        launcher.form(tickets)

    outcomes = run_generations(
        ranks, tickets, many_worlds, change, NUM_WORLDS, env=ONE_THREAD, timeout=600
    )
    for outcome in outcomes.values():
        assert outcome.exit_code == 0, describe(outcome)
        warm, last = outcome.result
        assert last[:2] == warm[:2]
        # One for each group: kept for the next world, and replaced when its pages are used up.
        assert len(last.segments) == len(warm.segments) == 2
        assert last.num_maps <= warm.num_maps + 2
    assert num_keys[-1] <= num_keys[WARM] + 2, num_keys
