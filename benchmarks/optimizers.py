"""Measure the update: LARS and LAMB compared with SGD and AdamW, and `share_weights`.

    python benchmarks/optimizers.py [--turns 15] [--steps 3] [--json FILE]

The parameters are ResNet-50's, the gradients synthetic; there is no forward or backward pass. There
is one torch thread per worker. All contenders take turns of a few steps, so that a busy moment of
the machine affects all of them; a first turn creates their state and does not count. A ratio is
taken within a turn, and its median and range over the turns are shown.

One worker: `step()` of LARS and LAMB is compared with torch's SGD and AdamW with `foreach=True`
(the fused ones are shown too). Target: at most 1.5 times as long.

Two workers: `apply()`, and `reduce_gradients()` with `apply()`, on the slowest worker of each turn,
are compared with the same optimizer without `share_weights`. Target for LARS and LAMB: `apply()` is
at least 1.7 times as fast.

While the first worker is timed alone, the second sleeps. A missed target is shown and is not an
error: this is a measurement.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import allstep
import allstep.torch as hvd
from allstep.bench.result import Row, document
from allstep.bench.script import parsed, positive, run_as_workers
from allstep.console.rich_table import figure_columns
from allstep.models import resnet50
from allstep.optim import LAMB, LARS, groups

# Maximum time compared with torch's foreach; minimum speed compared with no share_weights.
AT_MOST, AT_LEAST = 1.5, 1.7
UPDATE, WHOLE = "apply()", "reduce_gradients() and apply()"
# Low, so that the weights keep realistic values.
LEARNING_RATE = 1e-4

Make = Callable[[Any], Optimizer]
_sgd = partial(SGD, lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)
_adamw = partial(AdamW, lr=LEARNING_RATE, weight_decay=0.01)
CONTENDERS: Mapping[str, Make] = {
    "SGD, foreach": partial(_sgd, foreach=True),
    "SGD, fused": partial(_sgd, fused=True),
    "LARS": partial(LARS, lr=LEARNING_RATE, weight_decay=5e-4),
    "AdamW, foreach": partial(_adamw, foreach=True),
    "AdamW, fused": partial(_adamw, fused=True),
    "LAMB": partial(LAMB, lr=LEARNING_RATE, weight_decay=0.01),
}
REFERENCES = {
    name: "SGD, foreach" if name in ("SGD, fused", "LARS") else "AdamW, foreach"
    for name in CONTENDERS
}
REFERENCES["SGD, foreach"] = "SGD, foreach"
SHARING = ("SGD, foreach", "LARS", "AdamW, foreach", "LAMB")
OURS = ("LARS", "LAMB")


@dataclass(frozen=True)
class Found:
    """A contender's seconds of one step in each turn, and those of its reference."""

    workers: int
    what: str
    row: Row
    reference: Row
    """The reference's seconds in the same turns."""

    @property
    def ratios(self) -> list[float]:
        """Return the time on one worker, or the speed on two, as a multiple of the reference's."""
        pairs = zip(self.row.seconds, self.reference.seconds, strict=True)
        return [own / other if self.workers == 1 else other / own for own, other in pairs]

    @property
    def target(self) -> float | None:
        if self.row.name not in OURS or self.what != UPDATE:
            return None
        return AT_MOST if self.workers == 1 else AT_LEAST

    @property
    def met(self) -> bool | None:
        """Return whether the target is met, or None if there is none."""
        if self.target is None:
            return None
        ratio = statistics.median(self.ratios)
        return ratio <= self.target if self.workers == 1 else ratio >= self.target

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "workers": self.workers,
            "what": self.what,
            "seconds": list(self.row.seconds),
            "reference": self.reference.name,
            "reference_seconds": list(self.reference.seconds),
            "ratio": statistics.median(self.ratios),
            "target": self.target,
            "met": self.met,
        }


def with_gradients(model: nn.Module, chance: torch.Generator) -> list[Tensor]:
    """Set synthetic gradients of realistic size on the model's parameters and return them."""
    gradients = [torch.randn(each.shape, generator=chance) * 0.01 for each in model.parameters()]
    put(gradients, model)
    return gradients


def put(gradients: list[Tensor], model: nn.Module) -> None:
    """Set the gradients of the model's parameters."""
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


# One worker


def alone(options: argparse.Namespace) -> list[Found]:
    """Time all contenders on the same weights and gradients, each with its own state."""
    model = resnet50()
    with_gradients(model, torch.Generator().manual_seed(0))
    optimizers = {name: make(groups(model)) for name, make in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.turns + 1):
        for name, optimizer in optimizers.items():
            began = time.perf_counter()
            for _ in range(options.steps):
                optimizer.step()
            seconds[name].append((time.perf_counter() - began) / options.steps)
    rows = {name: Row(name, tuple(each[1:])) for name, each in seconds.items()}
    return [Found(1, UPDATE, row, rows[REFERENCES[name]]) for name, row in rows.items()]


# Two workers


@dataclass
class Worker:
    """A copy of the model on this rank, whose optimizer may share its weights with other ranks."""

    model: nn.Module
    gradients: list[Tensor]
    optimizer: Any

    def turn(self, steps: int) -> tuple[float, float]:
        """Return the seconds per step in reduce_gradients() and in apply(), on the slowest rank."""
        spent = torch.zeros(2, dtype=torch.float64)
        for _ in range(steps):
            put(self.gradients, self.model)
            spent[0] += timed_together(self.optimizer.reduce_gradients)
            spent[1] += timed_together(self.optimizer.apply)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        reduce, update = (spent / steps).tolist()
        return reduce, update


def timed_together(act: Callable[[], object]) -> float:
    """Return the seconds of `act` from when all ranks are ready."""
    dist.barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def make_worker(make: Make, rank: int, share: bool) -> Worker:
    torch.manual_seed(0)
    model = resnet50()
    gradients = with_gradients(model, torch.Generator().manual_seed(rank))
    wrapped = hvd.DistributedOptimizer(
        make(groups(model)), model.named_parameters(), share_weights=share
    )
    return Worker(model, gradients, wrapped)


def together(options: argparse.Namespace, rank: int) -> Iterator[Found]:
    """Time one optimizer after the other, private and shared alternately.

    All of them at once would need some gigabytes of memory.
    """
    for name in SHARING:
        private, shared = (make_worker(CONTENDERS[name], rank, share) for share in (False, True))
        times = [
            (private.turn(options.steps), shared.turn(options.steps))
            for _ in range(options.turns + 1)
        ][1:]
        for what, of in ((UPDATE, lambda spent: spent[1]), (WHOLE, sum)):
            rows = [
                Row(called, tuple(of(each[k]) for each in times))
                for k, called in enumerate(("without sharing", name))
            ]
            yield Found(2, what, rows[1], rows[0])


# Output


def table(found: list[Found]) -> Table:
    one = found[0].workers == 1
    first = "one worker" if one else "two workers, share_weights"
    ratio = "x foreach" if one else "x as fast"
    made = figure_columns([first], ["ms a step", "min to max", ratio, "min to max", "target"])
    for each in found:
        row, ratios = each.row, each.ratios
        name = row.name if one else f"{row.name}: {each.what}"
        sign = "<=" if one else ">="
        verdict = (
            "" if each.met is None else f"{sign} {each.target}: {'met' if each.met else 'not met'}"
        )
        figures = (
            f"{1e3 * row.median:.1f}",
            f"{1e3 * min(row.seconds):.1f} to {1e3 * max(row.seconds):.1f}",
        )
        compared = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
        made.add_row(name, *figures, *compared, verdict)
    return made


def show(found: list[Found], options: argparse.Namespace) -> None:
    console = Console(highlight=False, width=130)
    for workers in (1, 2):
        console.print(table([each for each in found if each.workers == workers]))
    print(
        f"Medians of {options.turns} turns of {options.steps} steps; ratios are taken within a"
        " turn."
    )
    if options.json:
        options.json.write_text(
            f"{document('optimizers', [each.to_json() for each in found], ())}\n"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--turns", type=positive, default=15, help="turns after the warm-up (default: 15)"
    )
    parser.add_argument("--steps", type=positive, default=3, help="steps of a turn (default: 3)")
    return parsed(parser)


def main() -> int:
    options = parse()
    run_as_workers(2)
    world = allstep.init()
    hvd.init()
    torch.set_num_threads(1)
    found = alone(options) if world.rank == 0 else []
    # The second worker sleeps here until the first has been timed.
    dist.barrier()
    found += together(options, world.rank)
    if world.rank == 0:
        show(found, options)
    hvd.shutdown()
    allstep.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
