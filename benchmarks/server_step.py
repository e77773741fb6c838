"""Measure a step of `sync=server` between hosts, next to the same step with `sync=allreduce`.

    python benchmarks/server_step.py [--hosts 2] [--ranks-per-host 2] [--mbit 1000] [--mb 32]
                                     [--repetitions 9]

The hosts are those of `two_hosts.py`, which needs root. A step reduces gradients and updates by
SGD: with `allreduce` every rank updates all weights, with `server` the owner of each part does.
Both take turns in the same processes; a time is that of the slowest rank. The weights are compared
at the end. "update" is the part of the step in which weights change, so the difference of the other
parts is the network's.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.distributed import all_reduce
from torch.distributed.distributed_c10d import ReduceOp

import allstep
from allstep.comm.group.init import group_for
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.updates import ByOwners, EveryRank, Update

sys.path.insert(0, str(Path(__file__).resolve().parent))

_SETTINGS = "SERVER_STEP"


class Contender:
    """One way to step, with weights of its own."""

    def __init__(self, name: str, update: Update, nbytes: int, size: int) -> None:
        # Eight layers, as a model has.
        layers = [nn.Parameter(torch.zeros(nbytes // 32)) for _ in range(8)]
        named = [Named(f"layer {n}", layer) for n, layer in enumerate(layers)]
        replicas = Replicas(named, lambda: group_for("gradients"), lambda: name, Rule())
        self.name, self.layers = name, layers
        self.optimizer: ReplicatedOptimizer = replicate(
            torch.optim.SGD(layers, lr=0.5, momentum=0.9), replicas, size, update
        )

    def step(self, rank: int) -> tuple[float, float]:
        """Make a step; return its seconds, and those of its update, in the slowest rank."""
        self.optimizer.zero_grad()
        for layer in self.layers:
            layer.grad = torch.full_like(layer, float(rank + 1))
        all_reduce(torch.zeros(1))
        begun = time.perf_counter()
        self.optimizer.reduce_gradients()
        middle = time.perf_counter()
        self.optimizer.apply()
        end = time.perf_counter()
        seconds = torch.tensor([end - begun, end - middle])
        all_reduce(seconds, ReduceOp.MAX)
        return seconds[0].item(), seconds[1].item()


def measure(nbytes: int, repetitions: int) -> None:
    """Run as a rank; rank 0 prints the figures as JSON."""
    world = allstep.init()
    made = [
        Contender("allreduce", EveryRank(), nbytes, world.size),
        Contender("server", ByOwners(torch.optim.SGD, one_in_run=True), nbytes, world.size),
    ]
    found: dict[str, list[tuple[float, float]]] = {each.name: [] for each in made}
    for number in range(repetitions + 2):
        for each in made:
            seconds = each.step(world.rank)
            # The first steps measure the link and make memory.
            if number >= 2:
                found[each.name].append(seconds)
    is_same = all(map(torch.equal, made[0].layers, made[1].layers))
    if world.rank == 0:
        print(json.dumps({"same": is_same, "found": found}), flush=True)
    for each in made:
        each.optimizer.close()
    allstep.shutdown()


def main() -> int:
    """Make the hosts, start the ranks on them, and print the table."""
    from two_hosts import LimitedHosts

    parser = argparse.ArgumentParser(description="A step of sync=server between hosts; needs root.")
    for name, default in (("hosts", 2), ("ranks-per-host", 2), ("mbit", 1000), ("mb", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    hosts = LimitedHosts(options.hosts, options.mbit)
    try:
        where = ",".join(f"{host}:{options.ranks_per_host}" for host in hosts.names)
        run = [sys.executable, "-m", "allstep", "run", "-H", where, "--ssh", hosts.ssh]
        settings = json.dumps([options.mb << 20, options.repetitions])
        command = ["env", f"{_SETTINGS}={settings}", sys.executable, __file__]
        done = subprocess.run([*run, *command], stdout=subprocess.PIPE, text=True, timeout=300)
    finally:
        hosts.close()
    if done.returncode:
        return done.returncode
    line = next(each for each in done.stdout.splitlines() if '"found"' in each)
    result = json.loads(line[line.index("{") :])
    base = median(step for step, _ in result["found"]["allreduce"])
    load = f"load {os.getloadavg()[0]:.0f}"
    print(f"{options.mb} MB, {where}, {options.mbit} Mbit/s, {load}; same bits: {result['same']}")
    for name, times in result["found"].items():
        steps = [step for step, _ in times]
        update = median(seconds for _, seconds in times)
        print(
            f"{name:10} {1e3 * median(steps):6.0f} ms ({1e3 * min(steps):.0f} to"
            f" {1e3 * max(steps):.0f}), of which update {1e3 * update:.0f} ms;"
            f" {median(steps) / base:.2f} x allreduce"
        )
    return 0


if __name__ == "__main__":
    if text := os.environ.get(_SETTINGS):
        measure(*json.loads(text))
    else:
        sys.exit(main())
