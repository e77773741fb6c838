"""A killed rank is noticed while the kernel still frees its memory, however it is waited for."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allstep
import allstep.torch as hvd
from allstep.errors import CommError
from allstep.process.liveness import life_of
from support.ranks import Ranks

MEGABYTES = 800  # the kernel needs some tenths of a second to free them
ROUNDS = 6  # a machine that stands still just when the rank dies gets another round

WAYS: dict[str, tuple[dict[str, str], Callable[[], Any]]] = {
    "shared memory": ({}, lambda: dist.all_reduce(torch.ones(1000))),
    "gloo": ({"ALLSTEP_ALGORITHM": "ring"}, lambda: dist.all_reduce(torch.ones(1000))),
    "a transfer": ({}, lambda: dist.recv(torch.ones(1000), 1)),
    "engine": ({}, lambda: hvd.allreduce(torch.ones(1000), name="sum")),
}


def wait_for_a_killed_rank(way: str) -> tuple[str, bool] | None:
    """The error, and whether the killed process was still there when it was raised."""
    world = allstep.init()
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if way == "engine":
        hvd.init()
    if world.rank == 1:
        memory = torch.ones(MEGABYTES << 18)
        dist.barrier()
        threading.Event().wait()
        del memory
    dist.barrier()
    life = life_of(pids[1])
    threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL)).start()
    try:
        WAYS[way][1]()
    except (CommError, hvd.HorovodInternalError) as error:
        was_there = not life.has_ended()
        if way == "engine":
            hvd.shutdown()
        return str(error), was_there
    return None


@pytest.mark.parametrize("way", WAYS)
def test_a_large_rank_is_missed_before_its_memory_is_free(ranks: Ranks, way: str) -> None:
    for _ in range(ROUNDS):
        outcomes = ranks.outcomes(2, wait_for_a_killed_rank, way, env=WAYS[way][0])
        assert outcomes[1].exit_code == -signal.SIGKILL, outcomes
        assert outcomes[0].exit_code == 0, outcomes[0].output
        text, was_there = outcomes[0].result
        assert "lost rank 1 (process exited)" in text
        if was_there:
            return
    pytest.fail("noticed only when the memory had been freed")
