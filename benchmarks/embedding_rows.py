"""Does a step on an embedding cost what its rows cost, whatever the size of the table?

    python benchmarks/embedding_rows.py [--rows 10000] [--width 64] [--tables 100000 1000000]
                                        [--optimizers sgd momentum adam] [--rounds 9] [--json FILE]

One worker, one thread, `dist_async`. A step pulls the rows of a batch, computes the gradient of an
`nn.Embedding(sparse=True)` and pushes it. The rows are drawn at random from the whole table, so
they are in all of its slices. In each round every table makes some steps, one after the other;
shown are the medians over the rounds of the CPU time of a step and the median ratio within a round.
Next to it is the push of the same gradient as a dense tensor, once.

Target: the largest table at most 1.3 times the smallest.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allstep import kvstore

OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.001}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}
STEPS = 5
"""Steps of a table in a round."""
TARGET = 1.3


@dataclass
class Table:
    """One table: CPU milliseconds of a step, and of its pull and push alone, in each round."""

    num_rows: int
    step: list[float] = field(default_factory=list)
    pull: list[float] = field(default_factory=list)
    push: list[float] = field(default_factory=list)
    dense: float = 0.0


class Worker:
    """A store with one table, and a copy of it for forward and backward."""

    def __init__(self, options: argparse.Namespace, optimizer: str, num_rows: int) -> None:
        cls, settings = OPTIMIZERS[optimizer]
        self.draws = torch.Generator().manual_seed(0)
        self.num_touched, self.found = options.rows, Table(num_rows)
        self.embedding = nn.Embedding(num_rows, options.width, sparse=True)
        self.shape = self.embedding.weight.shape
        self.out = torch.sparse_coo_tensor(size=self.shape, check_invariants=False)
        self.kv = kvstore.create("dist_async")
        # A store joins the world, which gives torch this worker's share of the cores.
        torch.set_num_threads(1)
        self.kv.init("table", self.embedding.weight)
        self.kv.set_optimizer(cls, **settings)
        # The first push sets the state of the whole table, and every page is there from then on.
        self.kv.push("table", torch.zeros(self.shape).to_sparse(1))
        self.steps(2)
        self.found = Table(num_rows)

    def steps(self, number: int = STEPS) -> None:
        """Make steps and note their mean times."""
        spent = dict.fromkeys(("pull", "push", "step"), 0.0)
        for _ in range(number):
            numbers = torch.randperm(self.shape[0], generator=self.draws)[: self.num_touched]
            start = time.process_time()
            spent["pull"] += cpu_ms(lambda numbers=numbers: self.pull(numbers))  # type: ignore[misc]
            gradient = self.gradient(numbers)
            spent["push"] += cpu_ms(lambda gradient=gradient: self.kv.push("table", gradient))  # type: ignore[misc]
            spent["step"] += (time.process_time() - start) * 1000
        for name, total in spent.items():
            getattr(self.found, name).append(total / number)

    def pull(self, numbers: Tensor) -> None:
        self.kv.row_sparse_pull("table", out=self.out, row_ids=numbers)
        with torch.no_grad():
            self.embedding.weight.index_copy_(0, self.out.indices()[0], self.out.values())

    def gradient(self, numbers: Tensor) -> Tensor:
        self.embedding.weight.grad = None
        self.embedding(numbers).square().sum().backward()
        assert self.embedding.weight.grad is not None
        return self.embedding.weight.grad

    def push_dense(self) -> None:
        gradient = self.gradient(torch.arange(self.num_touched)).to_dense()
        self.found.dense = cpu_ms(lambda: self.kv.push("table", gradient))


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1000


def main() -> int:
    options = parsed()
    torch.set_num_threads(1)
    print(f"{options.rows} rows of {options.width} in a step, dist_async, CPU ms")
    results = {name: measure(options, name) for name in options.optimizers}
    if options.json is not None:
        found = {name: [asdict(each) for each in tables] for name, tables in results.items()}
        options.json.write_text(json.dumps(found))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tables", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(options: argparse.Namespace, optimizer: str) -> list[Table]:
    """Measure all tables in turn, and print them."""
    workers = [Worker(options, optimizer, num_rows) for num_rows in options.tables]
    for number in range(options.rounds):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            worker.steps()
    for worker in workers:
        worker.push_dense()
        worker.kv.close()
    tables = [worker.found for worker in workers]
    for table in tables:
        print(row(optimizer, table, tables[0]), flush=True)
    return tables


def row(optimizer: str, table: Table, first: Table) -> str:
    ratio = statistics.median(a / b for a, b in zip(table.step, first.step, strict=True))
    step, pull, push = (statistics.median(each) for each in (table.step, table.pull, table.push))
    verdict = "" if table is first else f"  {ratio:.2f}x (target {TARGET})"
    return (
        f"{optimizer:10}{table.num_rows:>9} rows: step {step:6.1f}  pull {pull:5.1f}"
        f"  push {push:5.1f}  dense push {table.dense:6.0f}{verdict}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
