"""Measure the undo copy of shared weights, which an elastic run makes before each update.

    python benchmarks/undo_copy.py [--turns 9] [--steps 3] [--json FILE]

Two workers of one thread train AlexNet (224 x 224, 32 images a worker) and the small CNN (32 x 32,
64 images a worker) with SGD, momentum and shared weights. Steps with and without the copy take
turns on the same weights, so that a busy moment of the machine affects both; a first turn is a
warm-up. The time of a turn is that of the slowest worker, and the cost is taken within a turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import allstep
from allstep.bench.result import document
from allstep.bench.script import parsed, positive, run_as_workers
from allstep.comm.group.init import group_for
from allstep.models import AlexNet, SmallCnn
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import replicate
from allstep.parallel.updates import ByOwners


@dataclass(frozen=True)
class Task:
    """A model, and the shape of a worker's images."""

    make: Callable[[], nn.Module]
    images: tuple[int, int, int, int]


TASKS: Mapping[str, Task] = {
    "AlexNet": Task(AlexNet, (32, 3, 224, 224)),
    "small CNN": Task(lambda: SmallCnn(10, (3, 32, 32)), (64, 3, 32, 32)),
}


class Worker:
    """The training of one model on this rank."""

    def __init__(self, name: str, task: Task, rank: int, size: int) -> None:
        torch.manual_seed(0)
        self.model = task.make()
        chance = torch.Generator().manual_seed(rank)
        self.images = torch.randn(task.images, generator=chance)
        self.targets = torch.randint(10, task.images[:1], generator=chance)
        inner = SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        named = [Named(*each) for each in self.model.named_parameters()]
        replicas = Replicas(named, lambda: group_for("gradients"), lambda: name, Rule())
        update = ByOwners(SGD, keeps_undo=True)
        self.optimizer: Any = replicate(inner, replicas, size, update)
        self.sharing = update.sharing(self.optimizer)
        self.copy = self.sharing._keep_undo

    def turn(self, steps: int, *, copies: bool) -> Tensor:
        """Return the seconds of a step, and of its copy, on the slowest rank."""
        spent = torch.zeros(2, dtype=torch.float64)

        def timed_copy() -> None:
            began = time.perf_counter()
            self.copy()
            spent[1] += time.perf_counter() - began

        undo = self.sharing.parameters.undo
        self.sharing._keep_undo = timed_copy if copies else undo.begin
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self.images), self.targets).backward()
            self.optimizer.step()
        spent[0] = time.perf_counter() - began
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return spent / steps


def measure(worker: Worker, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model."""
    turns = [
        (
            worker.turn(options.steps, copies=False).tolist(),
            worker.turn(options.steps, copies=True).tolist(),
        )
        for _ in range(options.turns + 1)
    ][1:]
    bare = [without[0] for without, _ in turns]
    copies = [copied[1] for _, copied in turns]
    return {
        "bytes": 2 * sum(each.numel() * 4 for each in worker.model.parameters()),
        "seconds": statistics.median(bare),
        "copy_seconds": statistics.median(copies),
        "cost": statistics.median(copied[0] / without[0] - 1 for without, copied in turns),
        "of_step": [copy / step for copy, step in zip(copies, bare, strict=True)],
    }


def show(name: str, found: Mapping[str, Any]) -> None:
    parts = sorted(found["of_step"])
    print(
        f"{name}: undo copy of {found['bytes'] / 1e6:.3g} MB on both workers,"
        f" {1e3 * found['copy_seconds']:.3g} ms of a step of {1e3 * found['seconds']:.4g} ms:"
        f" {statistics.median(parts):.2%} ({parts[0]:.2%} to {parts[-1]:.2%}); whole steps with"
        f" and without it differ by {found['cost']:+.2%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=positive, default=9, help="turns (default: 9)")
    parser.add_argument("--steps", type=positive, default=3, help="steps a turn (default: 3)")
    options = parsed(parser)
    run_as_workers(2)
    world = allstep.init()
    torch.set_num_threads(1)
    rows = []
    for name, task in TASKS.items():
        worker = Worker(name, task, world.rank, world.size)
        rows.append({"name": name, **measure(worker, options)})
        worker.optimizer.close()
        if world.rank == 0:
            show(name, rows[-1])
    if world.rank == 0 and options.json:
        options.json.write_text(f"{document('undo-copy', rows, ())}\n")
    allstep.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
