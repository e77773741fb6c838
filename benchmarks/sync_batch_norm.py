"""Measure a training step of ResNet-18 with synchronized and with plain batch norm.

    python benchmarks/sync_batch_norm.py [--workers 2] [--batch 64] [--turns 9] [--steps 3]
                                         [--json FILE]

Images are 32 x 32 and made before timing starts; 64 per worker; one torch thread per worker; SGD
with momentum in a DistributedOptimizer. Both models are in the same processes and alternate in
turns of a few steps; a first turn is a warm-up and does not count. The time of a turn is that of
its slowest worker, and a ratio is taken within a turn. Target: at most 1.15 times as long.

Separate turns measure where the time goes, because recording costs some 10 us per collective:

```
step | arithmetic ...................................... | moving | waiting | adding |
     | forward, backward, update: all but collectives    | collectives (docs/timeline.md)
```

Collectives of the norms (one forward and one backward for each of 20 layers) are listed separately
from those of the gradients, which both models have. Time that a worker waits in a norm is time that
it does not wait for the gradients, so the rows should be read together. Figures are means over the
workers.

A missed target is shown and is not an error: this is a measurement.
"""

import argparse
import copy
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import allstep
import allstep.torch as hvd
from allstep.bench.result import Row, document
from allstep.bench.script import parsed, positive, run_as_workers
from allstep.comm.timeline import recorder
from allstep.console.rich_table import figure_columns
from allstep.models import resnet18
from allstep.norm import convert
from allstep.norm.among import ranks_of

# Maximum time, as a multiple of the time with plain batch norm.
TARGET = 1.15
PLAIN, SYNC = "BatchNorm", "SyncBatchNorm"
COLLECTIVES = (recorder.WAITING, recorder.MOVING, recorder.ADDING)
NORMS = "norms"
PARTS = (
    *(f"{NORMS}: {kind}" for kind in COLLECTIVES),
    *(f"gradients: {kind}" for kind in COLLECTIVES),
    "arithmetic",
)
Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Trainee:
    """A copy of the model with one kind of norm, and its measurements."""

    model: nn.Module
    optimizer: Any
    seconds: list[float] = field(default_factory=list)
    """Seconds of a step, for each timed turn."""
    parts: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each part of a step, for each recorded turn."""

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    def turn(self, batches: Batches, looking: bool) -> None:
        """Run one step per batch after a barrier, and record the time or (`looking`) its parts."""
        parts: dict[str, float] = defaultdict(float)
        dist.barrier()
        with looked_into(parts) if looking else nullcontext():
            began = time.perf_counter()
            for batch in batches:
                self.step(*batch)
            own = time.perf_counter() - began
        if looking:
            parts["arithmetic"] = own - sum(parts.values())
            total = _reduced([parts[part] for part in PARTS], dist.ReduceOp.SUM)
            mean = total / dist.get_world_size() / len(batches)
            self.parts.append(dict(zip(PARTS, mean.tolist(), strict=True)))
        else:
            self.seconds.append(_reduced([own], dist.ReduceOp.MAX).item() / len(batches))


def _reduced(figures: list[float], op: Any) -> Tensor:
    """Return the figures reduced over all ranks by `op`."""
    made = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(made, op)
    return made


@contextmanager
def looked_into(parts: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of this rank's collectives, by purpose and kind."""
    before, recorder.active = recorder.active, recorder.Recorder()
    try:
        yield
    finally:
        operations, _ = recorder.active.take()
        recorder.active = before
    for operation in operations:
        purpose = operation.group if operation.group == NORMS else "gradients"
        for kind, began, ended in recorder.spans(operation):
            parts[f"{purpose}: {kind}"] += (ended - began) / 1e9


def name_the_norms() -> None:
    """Set the name of the norms' process group for the recorder.

    Groups that torch does not know have no name there. All ranks call this together.
    """
    group: Any = ranks_of(None)
    if group.size() > 1:
        group.local.name = NORMS


def trainees() -> dict[str, Trainee]:
    torch.manual_seed(0)
    plain = resnet18(10, small_pictures=True)
    models = {PLAIN: plain, SYNC: convert(copy.deepcopy(plain), sync=True)}
    return {name: Trainee(model, _optimizer(model)) for name, model in models.items()}


def _optimizer(model: nn.Module) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters())


def batches_of(turn: int, rank: int, options: argparse.Namespace) -> Batches:
    """Return synthetic images and labels, always the same for a rank and turn."""
    chance = torch.Generator().manual_seed(1000 * turn + rank)
    shape = (options.batch, 3, 32, 32)
    return [
        (torch.randn(shape, generator=chance), torch.randint(10, shape[:1], generator=chance))
        for _ in range(options.steps)
    ]


def measure(options: argparse.Namespace, rank: int) -> dict[str, Trainee]:
    """Run timed turns, and after every third of them a turn that records the parts."""
    both = trainees()
    name_the_norms()
    for turn in range(options.turns + 1):
        batches = batches_of(turn, rank, options)
        for trainee in both.values():
            trainee.turn(batches, looking=False)
        if turn % 3 == 1:
            for trainee in both.values():
                trainee.turn(batches, looking=True)
    for trainee in both.values():
        del trainee.seconds[0]
    return both


@dataclass(frozen=True)
class Findings:
    """The measurements of both models."""

    rows: Mapping[str, Row]
    parts: Mapping[str, Mapping[str, float]]
    """Seconds of each part of a step: medians over the turns."""

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.rows[SYNC].seconds, self.rows[PLAIN].seconds, strict=True)
        return [sync / plain for sync, plain in pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def to_json(self, options: argparse.Namespace) -> str:
        common = {
            "workers": options.workers,
            "batch_per_worker": options.batch,
            "steps_per_turn": options.steps,
        }
        rows = [
            {"name": name, **common, "seconds": list(row.seconds), "parts": dict(self.parts[name])}
            for name, row in self.rows.items()
        ]
        rows[-1] |= {"ratio": self.ratio, "target": TARGET, "met": self.ratio <= TARGET}
        return document("sync_batch_norm", rows, ())


def findings(both: Mapping[str, Trainee]) -> Findings:
    rows = {name: Row(name, tuple(trainee.seconds)) for name, trainee in both.items()}
    parts = {
        name: {part: statistics.median(each[part] for each in trainee.parts) for part in PARTS}
        for name, trainee in both.items()
    }
    return Findings(rows, parts)


def table_of_parts(found: Findings) -> Table:
    """Return a table of milliseconds per step, and the differences as shares of the plain step."""
    made = figure_columns(["where a step goes, ms"], [PLAIN, SYNC, "more", "of the plain step"])
    whole = sum(found.parts[PLAIN].values())
    for part in PARTS:
        plain, sync = found.parts[PLAIN][part], found.parts[SYNC][part]
        figures = [f"{1e3 * seconds:.2f}" for seconds in (plain, sync, sync - plain)]
        made.add_row(part, *figures, f"{(sync - plain) / whole:+.1%}")
    return made


def show(found: Findings, options: argparse.Namespace) -> None:
    console = Console(highlight=False, width=110)
    made = figure_columns(["a step of ResNet-18"], ["median ms", "min", "max"])
    for name, row in found.rows.items():
        made.add_row(
            name,
            *(f"{1e3 * each:.1f}" for each in (row.median, min(row.seconds), max(row.seconds))),
        )
    console.print(made)
    console.print(table_of_parts(found))
    spread = f"{min(found.ratios):.3f} to {max(found.ratios):.3f}"
    verdict = "met" if found.ratio <= TARGET else "not met"
    print(f"{found.ratio:.3f} times as long ({spread}); target at most {TARGET}: {verdict}.")
    print(
        f"Medians of {options.turns} turns of {options.steps} steps, {options.batch} a worker,"
        f" {options.workers} workers."
    )
    if options.json:
        options.json.write_text(f"{found.to_json(options)}\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--workers", type=positive, default=2, help="workers on this host (default: 2)"
    )
    parser.add_argument(
        "--batch", type=positive, default=64, help="images per worker and step (default: 64)"
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
    hvd.init()
    torch.set_num_threads(1)
    # Another launcher may have started a different number of workers.
    options.workers = world.size
    both = measure(options, world.rank)
    if world.rank == 0:
        show(findings(both), options)
    hvd.shutdown()
    allstep.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
