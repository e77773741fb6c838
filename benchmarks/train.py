"""Compare `allstep train` on two workers with one worker, two threads and plain PyTorch.

    python benchmarks/train.py [--rounds 3] [--epochs 6] [--goal 0.90] [--json FILE]
    python benchmarks/train.py --as-is [--rounds 3]

The dataset is the recipe's Fashion-MNIST, with a small CNN of 98,442 parameters and a global batch
of 128. In each round every contestant trains once, one after the other, so that a busy hour of the
machine affects all of them; ratios are taken within a round, and their median and range are shown.
Speed is images per second of training, without start and evaluation, as each contestant reports it.
Time to the goal is the training time until an evaluation, four per epoch, reaches the goal on the
5,000 held-out images. Each round has its own seed.

| contestant | workers x threads | notes |
|---|---|---|
| allstep, 2 workers | 2 x 1 | `allstep train --workers 2` |
| allstep, 1 worker | 1 x 1 | |
| allstep, 1 process | 1 x 2 | the threads of one process share the work of each operation |
| allstep, 2 strangers | 2 x 1 | two independent runs with half the batch: the machine's maximum |
| plain PyTorch | 2 x 1 | DDP on Gloo; DataLoader with 0 or 1 worker processes, the faster one |
| plain PyTorch, channels last | 2 x 1 | the same with the faster memory layout |

With --as-is, it is one epoch of the unchanged recipe (batch 512, precision auto, images shifted and
mirrored), without plain PyTorch.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from allstep import data, runlog
from allstep.data import order
from allstep.train import read_config
from allstep.train.input.splits import open_splits

OVERRIDES = [
    *(
        "model=small-cnn",
        "model.norm=none",
        "model.options.widths=[16,32,64]",
        "model.options.hidden=128",
    ),
    *(
        "data.augment=none",
        "batch=128",
        "optimizer.lr=0.1",
        "optimizer.base_batch=128",
        "optimizer.weight_decay=5e-4",
    ),
    *(
        "schedule.shape=cosine",
        "schedule.warmup=0.5",
        "label_smoothing=0",
        "evaluation.flip=false",
        "optimizer.bias_lr=1",
    ),
    *(
        "optimizer.momentum=0.9",
        "ema.decay=null",
        "evaluation.weights=last",
        "optimizer.decay_all=true",
        "precision=float32",
    ),
]
FIRST, PLAIN_PYTORCH = "allstep, 2 workers", "plain PyTorch, 2 workers"
PLAIN = Path(__file__).with_name("plain_fashion_mnist.py")
Measured = dict[str, float]


def allstep_run(
    workers: int,
    threads: int,
    options: argparse.Namespace,
    folder: Path,
    overrides: Sequence[str] = (),
) -> Measured:
    """Train once and return images per second and seconds to the goal."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    usual = ["epochs=1"] if options.as_is else [*OVERRIDES, f"epochs={options.epochs}"]
    settings = [
        *usual,
        *overrides,
        f"evaluation.stop_at={options.goal}",
        "evaluation.every=0.25",
        f"seed={options.seed}",
    ]
    command = [
        sys.executable,
        "-m",
        "allstep",
        "train",
        "fashion-mnist",
        *settings,
        "--workers",
        str(workers),
        "--out",
        str(out),
    ]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    record = runlog.read(out / "run.jsonl")
    assert record.end is not None
    evals = [line for line in record.evals if line["part"] == "validation"]
    seconds = sum(step["seconds"] for step in record.steps)
    reached = evals[-1]["accuracy"] >= options.goal
    return {
        "speed": record.end["images_per_second"],
        "to_goal": seconds if reached else float("nan"),
    }


def two_strangers(options: argparse.Namespace, folder: Path) -> Measured:
    """Run two independent trainings at the same time, with half the batch each."""
    half = (
        ["batch=256", "optimizer.base_batch=256"]
        if options.as_is
        else ["batch=64", "optimizer.base_batch=64"]
    )
    with ThreadPoolExecutor(2) as both:
        runs = list(both.map(lambda _: allstep_run(1, 1, options, folder, half), range(2)))
    return {"speed": sum(each["speed"] for each in runs), "to_goal": float("nan")}


def plain_run(
    options: argparse.Namespace, arrays: Path, facts: dict[str, float], channels_last: bool
) -> Measured:
    """Train in plain PyTorch, with the faster of two ways to load."""
    both = [
        _plain_run(num_workers, options, arrays, facts, channels_last) for num_workers in (0, 1)
    ]
    return max(both, key=lambda each: each["speed"])


def _plain_run(
    num_workers: int,
    options: argparse.Namespace,
    arrays: Path,
    facts: dict[str, float],
    channels_last: bool,
) -> Measured:
    settings = {
        **facts,
        "arrays": str(arrays),
        "batch": 128,
        "lr": 0.1,
        "weight_decay": 5e-4,
        "warmup": 0.5,
        "seed": options.seed,
        "widths": [16, 32, 64],
        "hidden": 128,
        "epochs": options.epochs,
        "schedule_epochs": options.epochs,
        "goal": options.goal,
        "num_workers": num_workers,
        "channels_last": channels_last,
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(PLAIN),
        json.dumps(settings),
    ]
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    last = json.loads(done.stdout.splitlines()[-1])
    reached = last["accuracy"] >= options.goal
    return {
        "speed": last["samples"] / last["seconds"],
        "to_goal": last["seconds"] if reached else float("nan"),
    }


def write_arrays(folder: Path) -> tuple[Path, dict[str, float]]:
    """Write the samples of allstep's split as arrays for plain PyTorch."""
    splits = open_splits(read_config("fashion-mnist", OVERRIDES))
    images = data.load(data.find(data.named_set("fashion-mnist"))).train
    n, held_out = len(images), len(splits.validation)
    samples = {
        "train": order.kept(np.arange(n - held_out), n, held_out, 0),
        "validation": order.held_out(n, held_out, 0),
    }
    arrays = {
        f"{split}_{name}": getattr(images, name)[numbers]
        for split, numbers in samples.items()
        for name in ("images", "labels")
    }
    path = folder / "arrays.npz"
    np.savez(path, **arrays)
    trained = arrays["train_images"]
    return path, {
        "mean": float(trained.mean()),
        "std": float(trained.std()),
        "num_train": len(trained),
    }


def one_round(
    options: argparse.Namespace, folder: Path, arrays: Path, facts: dict[str, float]
) -> dict[str, Measured]:
    measured = {
        FIRST: allstep_run(2, 1, options, folder),
        "allstep, 1 worker, 1 thread": allstep_run(1, 1, options, folder),
        "allstep, 1 process, 2 threads": allstep_run(1, 2, options, folder),
        "allstep, 2 strangers": two_strangers(options, folder),
    }
    if not options.as_is:
        measured[PLAIN_PYTORCH] = plain_run(options, arrays, facts, channels_last=False)
        measured["plain PyTorch, channels last"] = plain_run(
            options, arrays, facts, channels_last=True
        )
    return measured


def spread(values: list[float]) -> str:
    """Return median and range; empty if a run did not reach the goal, or has none."""
    if any(map(math.isnan, values)):
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(rounds: list[dict[str, dict[str, float]]]) -> Table:
    made = Table(
        "",
        "images/s",
        "2 workers are so many times as fast",
        "seconds to the goal",
        "2 workers need so much of it",
        box=box.SIMPLE,
    )
    for name in rounds[0]:
        speeds = [each[name]["speed"] for each in rounds]
        ratios = [each[FIRST]["speed"] / each[name]["speed"] for each in rounds]
        goals = [each[name]["to_goal"] for each in rounds]
        parts = [each[FIRST]["to_goal"] / each[name]["to_goal"] for each in rounds]
        made.add_row(
            name, f"{statistics.median(speeds):,.0f}", spread(ratios), spread(goals), spread(parts)
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of a run (default: 6)")
    parser.add_argument("--goal", type=float, default=0.90, help="accuracy (default: 0.90)")
    parser.add_argument("--as-is", action="store_true", help="one epoch of the unchanged recipe")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        arrays, facts = write_arrays(Path(name))
        for number in range(options.rounds):
            options.seed = number
            rounds.append(one_round(options, Path(name), arrays, facts))
            print(f"round {number + 1} of {options.rounds} is done", file=sys.stderr)
    Console(width=130).print(table(rounds))
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
