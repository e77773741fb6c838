"""How long until a waiting rank notices that another rank, with much memory, was killed?

    python benchmarks/noticed.py [--megabytes 50 500 2000] [--rounds 9] [--way memory|engine|gloo]

Two ranks on this host. Rank 1 fills its memory, then sleeps; rank 0 waits for it in an all_reduce.
Rank 1 is killed with SIGKILL. The result is the time in ms from the kill to the `PeerLost` of rank
0, alternately with the flags of the killed rank's tasks (see `allstep.process.liveness`) and with
its pidfd and sockets alone. The third column is the time until the kernel has freed the memory,
according to the parent's pidfd. Target: below 100 ms, the median of 9 rounds, with 2000 MB.

--way: memory is `dist.all_reduce` through shared memory, engine is `hvd.allreduce`, gloo is
`dist.all_reduce` over sockets.
"""

import argparse
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist

import allstep
import allstep.torch as hvd
from allstep import wire
from allstep.errors import PeerLost
from allstep.process import liveness
from allstep.world import places

# Seconds that rank 0 waits before rank 1 is killed.
SETTLE = 0.3
MODES = ("flags", "pidfd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[50, 500, 2000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--way", choices=("memory", "engine", "gloo"), default="memory")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES)
    given = parser.parse_args()
    print(f"killed rank noticed, {given.way}, ms: median (least to most) of {given.rounds} rounds")
    for megabytes in given.megabytes:
        found: dict[str, list[float]] = {mode: [] for mode in given.modes}
        freed: list[float] = []
        for _ in range(given.rounds):
            for mode in given.modes:
                noticed, gone = one_round(megabytes, given.way, mode)
                found[mode].append(noticed)
                freed.append(gone)
        columns = {**found, "memory freed": freed}
        texts = [f"{name} {spread(times)}" for name, times in columns.items()]
        print(f"{megabytes:5} MB", *texts, sep="   ", flush=True)


def spread(seconds: list[float]) -> str:
    times = [1000 * each for each in seconds]
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"


def one_round(megabytes: int, way: str, mode: str) -> tuple[float, float]:
    """Return the seconds from the kill to the error of rank 0, and to the end of the process."""
    started = [start(rank, megabytes, way, mode) for rank in range(2)]
    with wire.Server(token := wire.new_token()) as store:
        common = {"ALLSTEP_STORE": f"127.0.0.1:{store.port}", "ALLSTEP_TOKEN": token}
        for (_, link), world in zip(started, places(["here", "here"]), strict=True):
            link.send({**common, **world.to_env()})
        for _, link in started:
            assert link.recv() == "ready"
        time.sleep(SETTLE)
        victim = started[1][0]
        pidfd = os.pidfd_open(victim)
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        select.select([pidfd], [], [])
        gone = time.monotonic() - killed_at
        noticed = started[0][1].recv() - killed_at
        os.close(pidfd)
    for pid, link in started:
        os.waitpid(pid, 0)
        link.close()
    return noticed, gone


def start(rank: int, *how: Any) -> tuple[int, Connection]:
    """Fork a rank, so that torch is imported once for all rounds."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            be_a_rank(rank, theirs, *how)
        finally:
            os._exit(0)
    theirs.close()
    return pid, ours


def be_a_rank(rank: int, link: Connection, megabytes: int, way: str, mode: str) -> None:
    os.environ.update(link.recv(), OMP_NUM_THREADS="1")
    if mode == "pidfd":
        liveness.Life.is_ending = liveness.Life.has_ended  # type: ignore[method-assign]
    act = waiting(way)
    act()
    if rank == 1:
        memory = torch.ones(megabytes << 18)
        link.send("ready")
        time.sleep(600)
        print(memory.sum())
    link.send("ready")
    try:
        act()
    except (PeerLost, hvd.HorovodInternalError):
        link.send(time.monotonic())


def waiting(way: str) -> Callable[[], Any]:
    """Return the call in which rank 0 waits."""
    if way == "engine":
        hvd.init()
        return lambda: hvd.allreduce(torch.ones(1000), name="sum")
    if way == "gloo":
        os.environ["ALLSTEP_ALGORITHM"] = "ring"
    allstep.init()
    return lambda: dist.all_reduce(torch.ones(1000))


if __name__ == "__main__":
    sys.exit(main())
