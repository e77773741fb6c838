"""Measure unmodified DDP with AlexNet on two workers of one host: backend "allstep" and "gloo".

    python benchmarks/ddp_alexnet.py [--workers 2] [--batch 32] [--turns 9] [--steps 3]
                                     [--json FILE]

Both backends train in the same processes: there are two groups of the same ranks, and on each a DDP
around a copy of the same model, with SGD and momentum. They alternate in turns of a few steps, so
that a busy moment of the machine affects both; a first turn is a warm-up and does not count. The
time of a turn is that of its slowest worker, and its speed is the images of all workers divided by
that time. There is one torch thread per worker, a batch of 32 per worker, and images of 224 x 224
that are made before timing starts.

At each step both see the same images and the same dropout, so their losses must be equal; they are
printed side by side. Losses that differ by more than float32 rounding end the run with status 1. A
missed target does not: this is a measurement.
"""

import argparse
import copy
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import allstep
from allstep.bench.result import Row, document
from allstep.bench.script import parsed, positive, run_as_workers
from allstep.models import AlexNet

# Minimum images per second, as a multiple of Gloo's.
TARGET = 1.08
BACKENDS = ("allstep", "gloo")
# Relative; two ranks add the same two numbers on either backend.
SAME_LOSS = 1e-5


@dataclass
class Trainee:
    """A copy of the model on one backend, with its seconds per turn and losses per step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        """Run one training step and return the loss."""
        # The seed of the dropout.
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def turn(self, batches: list[tuple[Tensor, Tensor]], seed: int) -> None:
        """Run one step per batch, and record the time from when all ranks are ready."""
        dist.barrier()
        started = time.perf_counter()
        losses = [self.step(*batch, seed + number) for number, batch in enumerate(batches)]
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        mean_losses = torch.stack(losses) / dist.get_world_size()
        dist.all_reduce(mean_losses)
        self.seconds.append(seconds.item())
        self.losses += mean_losses.tolist()


def trainees() -> dict[str, Trainee]:
    """Return a copy of the model for each backend."""
    torch.manual_seed(0)
    model = AlexNet()
    found = {}
    for backend in BACKENDS:
        wrapped = DistributedDataParallel(
            copy.deepcopy(model), process_group=dist.new_group(backend=backend)
        )
        found[backend] = Trainee(
            wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
        )
    return found


def batches_of(turn: int, rank: int, options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    """Return synthetic images and labels, always the same for a rank and turn."""
    chance = torch.Generator().manual_seed(1000 * turn + rank)
    shape = (options.batch, 3, 224, 224)
    return [
        (torch.randn(shape, generator=chance), torch.randint(1000, shape[:1], generator=chance))
        for _ in range(options.steps)
    ]


def measure(options: argparse.Namespace, rank: int) -> dict[str, Trainee]:
    """Give both backends alternate turns."""
    both = trainees()
    for turn in range(options.turns + 1):
        batches = batches_of(turn, rank, options)
        for trainee in both.values():
            trainee.turn(batches, seed=turn * options.steps)
    return both


def show(both: dict[str, Trainee], options: argparse.Namespace) -> int:
    """Print the losses and the table, and return the exit status."""
    images = options.workers * options.batch * options.steps
    rows = {name: Row(name, tuple(trainee.seconds[1:])) for name, trainee in both.items()}
    ratio = rows["gloo"].median / rows["allstep"].median
    furthest = _show_losses(both)
    table = Table("DDP on", box=box.SIMPLE_HEAD)
    for head in ("images/s", "min", "max", "x gloo"):
        table.add_column(head, justify="right")
    for row in rows.values():
        speeds = [
            f"{images / seconds:.1f}"
            for seconds in (row.median, max(row.seconds), min(row.seconds))
        ]
        table.add_row(row.name, *speeds, f"{rows['gloo'].median / row.median:.3f}")
    Console(highlight=False).print(table)
    verdict = "met" if ratio >= TARGET else "not met"
    print(
        f"{ratio:.3f} times Gloo; target {TARGET}: {verdict}. Medians of {options.turns} turns of"
        f" {options.steps} steps."
    )
    if options.json:
        options.json.write_text(f"{document('ddp_alexnet', _as_json(rows, both, options), ())}\n")
    if not furthest <= SAME_LOSS:
        print(
            f"error: the losses differ by up to {furthest:.1e} of their size, more than"
            f" {SAME_LOSS:.0e}",
            file=sys.stderr,
        )
        return 1
    return 0


def _show_losses(both: dict[str, Trainee]) -> float:
    """Print the losses of each step, and return the largest relative difference."""
    print("step  " + "  ".join(f"{name:>10}" for name in both))
    furthest = torch.tensor(0.0)
    for step, losses in enumerate(
        zip(*(trainee.losses for trainee in both.values()), strict=True), 1
    ):
        print(f"{step:4}  " + "  ".join(f"{loss:10.6f}" for loss in losses))
        values = torch.tensor(losses)
        difference = (values - values[-1]).abs().max() / values[-1].abs()
        # Unlike max(), this keeps NaN.
        furthest = torch.maximum(furthest, difference)
    print(f"largest difference {furthest.item():.1e} of the loss")
    return furthest.item()


def _as_json(
    rows: dict[str, Row], both: dict[str, Trainee], options: argparse.Namespace
) -> list[dict[str, Any]]:
    images = options.workers * options.batch * options.steps
    return [
        {
            "name": name,
            "workers": options.workers,
            "batch_per_worker": options.batch,
            "steps_per_turn": options.steps,
            "seconds": list(row.seconds),
            "images_per_second": images / row.median,
            "speed": {"gloo": rows["gloo"].median / row.median},
            "target": {"gloo": TARGET} if name == "allstep" else {},
            "losses": both[name].losses,
        }
        for name, row in rows.items()
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Unmodified DDP on AlexNet: backend allstep compared with backend gloo."
    )
    parser.add_argument(
        "--workers", type=positive, default=2, help="workers on this host (default: 2)"
    )
    parser.add_argument(
        "--batch", type=positive, default=32, help="images per worker and step (default: 32)"
    )
    parser.add_argument(
        "--turns", type=positive, default=9, help="turns after the warm-up (default: 9)"
    )
    parser.add_argument("--steps", type=positive, default=3, help="steps of a turn (default: 3)")
    return parsed(parser)


def main() -> int:
    options = parse()
    run_as_workers(options.workers)
    world = allstep.init()
    torch.set_num_threads(1)
    # Another launcher may have started a different number of workers.
    options.workers = world.size
    both = measure(options, world.rank)
    status = show(both, options) if world.rank == 0 else 0
    allstep.shutdown()
    return status


if __name__ == "__main__":
    sys.exit(main())
