"""One rank of `allstep bench plan`: trains a model that sleeps, on requests of the bench.

    python -m allstep.bench.plan.rank SOCKET

The bench starts it in the namespace of its host, with torchrun's variables, and exchanges lines of
JSON with it::

    rank  -> {"rank": 0, "size": 8, "names": []}
    bench -> {"message": 50}
    rank  -> {"seconds": [...]}                of sums of one number by the first two hosts
    bench -> {"train": [0, 1, 2, 3], "layers": [[1000000, 0.02, 0.05], ...], "limit": 1000000,
              "slow": 1.0, "steps": 8}
    rank  -> {"seconds": [...], "cpu": 0.05}   of each step; of a rank that trains

A rank that does not belong to the ranks of a request answers {} and sleeps.
"""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import allstep.comm
from allstep.bench.comm.rank import serve
from allstep.bench.plan.sleeping import sleeping_layers
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate

_SECONDS_TO_WAIT = 120
# The first step agrees on the buckets and measures the link.
_WARM_UP = 2
_PAUSE = 0.005


class PlanRank:
    """Executes the requests of the bench on one rank."""

    names: list[str]

    def __init__(self, rank: int, size: int, per_host: int) -> None:
        self.rank, self.size, self.names = rank, size, []
        self._per_host = per_host
        self._number = 0

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer."""
        return self._message(**order) if "message" in order else self._train(**order)

    def _message(self, message: int) -> dict[str, Any]:
        """Time sums of one number by the first ranks of two hosts: a message there and back."""
        ranks = [0, self._per_host]
        group, one = dist.new_group(ranks, backend="allstep"), torch.zeros(1)
        seconds: list[float] = []
        if self.rank in ranks:
            for _ in range(message):
                # As in training, the ranks have not exchanged anything for some time.
                time.sleep(_PAUSE)
                began = time.perf_counter()
                dist.all_reduce(one, group=group)
                seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def _train(
        self,
        train: list[int],
        layers: list[tuple[float, float, float]],
        limit: int,
        slow: float,
        steps: int,
    ) -> dict[str, Any]:
        group = dist.new_group(train, backend="allstep")
        self._number += 1
        if self.rank not in train:
            return {}
        model = sleeping_layers(layers, slow if self.rank == train[-1] else 1.0)
        optimizer = self._optimizer(model, group, limit, len(train))
        self._steps(model, optimizer, _WARM_UP)
        self._check(model, len(train))
        dist.barrier(group)
        cpu = time.process_time()
        seconds = self._steps(model, optimizer, steps)
        cpu = time.process_time() - cpu
        dist.barrier(group)
        optimizer.close()
        return {"seconds": seconds, "cpu": cpu}

    def _optimizer(
        self, model: torch.nn.Module, group: Any, limit: int, size: int
    ) -> ReplicatedOptimizer:
        named = [Named(*each) for each in model.named_parameters()]
        key = f"bench/plan/{self._number}"
        replicas = Replicas(named, lambda: group, lambda: key, Rule(), bucket=limit)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        return replicate(sgd, replicas, size)

    def _steps(
        self, model: torch.nn.Module, optimizer: ReplicatedOptimizer, steps: int
    ) -> list[float]:
        """Train, and return the seconds of each step."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            optimizer.zero_grad()
            # All elements of the gradients are the rank's number, counted from 1.
            data = torch.zeros(1, requires_grad=True)
            (model(data) * (self.rank + 1)).sum().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _check(self, model: torch.nn.Module, size: int) -> None:
        """Raise ArithmeticError unless every gradient is the mean over the ranks."""
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            if not torch.all(parameter.grad == (size + 1) / 2):
                raise ArithmeticError(f"wrong mean of the gradients of {name}")


def main(path: str) -> None:
    """Serve the bench as one rank."""
    os.environ.setdefault("ALLSTEP_TIMEOUT", str(_SECONDS_TO_WAIT))
    world = allstep.comm.init()
    torch.set_num_threads(1)
    serve(path, PlanRank(world.rank, world.size, world.local_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
