"""How much do shares by speed gain when one of two workers is slow?

    python benchmarks/shares.py [--rounds 9] [--slow 2] [--batch 128] [--after 100] [--json FILE]

Two workers of one thread each train the small CNN of `benchmarks/train.py` on Fashion-MNIST for one
epoch, worker 1 with `--fault slow:2@rank=1`. In each round `shares=even` and `shares=speed` run one
after the other, in changing order, so that a busy minute of the machine affects both; ratios are
taken within a round, and their median and range are shown. Speed is images per second from step 100
on, from the step lines of `run.jsonl`.

The ideal is computed from the even run of the round: the time of a step if both workers needed the
same time for input and compute, and the rest of the step stayed as it is. Target: 1.3 times the
even shares.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allstep import runlog

OVERRIDES = [
    *("model=small-cnn", "model.norm=none", "model.options.widths=[16,32,64]"),
    *("model.options.hidden=128", "data.augment=none", "optimizer.lr=0.05", "precision=float32"),
    *("optimizer.bias_lr=1", "ema.decay=null", "evaluation.flip=false", "label_smoothing=0"),
    *("schedule.shape=cosine", "schedule.warmup=0.1", "epochs=1", "save.seconds=null"),
]
TARGET = 1.3


@dataclass(frozen=True)
class Measured:
    """One run: images per second, the ideal gain of other shares, the last shares and the loss."""

    speed: float
    ideal: float
    shares: list[int]
    loss: float


@dataclass(frozen=True)
class Pair:
    """One round."""

    even: Measured
    speed: Measured

    @property
    def ratio(self) -> float:
        return self.speed.speed / self.even.speed


def main() -> int:
    options = parsed()
    print(
        f"small CNN, batch {options.batch}, 2 workers, worker 1 at 1/{options.slow:g} speed;"
        f" images/s from step {options.after} on"
    )
    pairs: list[Pair] = []
    for number in range(options.rounds):
        names = ("even", "speed") if number % 2 == 0 else ("speed", "even")
        found = {name: one_run(name, options) for name in names}
        pairs.append(Pair(**found))
        print(described(pairs[-1]), flush=True)
    show(pairs)
    if options.json is not None:
        rounds = [{**asdict(pair), "ratio": pair.ratio} for pair in pairs]
        options.json.write_text(json.dumps({"options": plain(options), "rounds": rounds}))
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slow", type=float, default=2.0, help="factor of worker 1")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--after", type=int, default=100, help="first step that counts")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) for name, value in vars(options).items()}


def one_run(shares: str, options: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        batch = [f"batch={options.batch}", f"optimizer.base_batch={options.batch}"]
        fault = f"slow:{options.slow:g}@rank=1"
        command = [sys.executable, "-m", "allstep", "train", "fashion-mnist", *OVERRIDES, *batch]
        command += [f"shares={shares}", "--fault", fault, "--workers", "2", "--out", str(out)]
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return measured(runlog.read(out / "run.jsonl"), options.after * options.batch)


def measured(record: runlog.RunRecord, first: int) -> Measured:
    """Return the figures of the steps after `first` samples."""
    lines = [line for line in record.steps if line["samples"] > first]
    # The first of them may include earlier steps.
    start, lines = lines[0]["samples"], lines[1:]
    seconds = sum(line["seconds"] for line in lines)
    work = [sum(line["input"][rank] + line["compute"][rank] for line in lines) for rank in range(2)]
    balanced = 2 * work[0] * work[1] / sum(work)
    changes = [line["shares"] for line in record.events if "shares" in line]
    assert record.end is not None
    return Measured(
        speed=(lines[-1]["samples"] - start) / seconds,
        ideal=seconds / (seconds - max(work) + balanced),
        shares=changes[-1] if changes else [1, 1],
        loss=record.end["test"]["loss"],
    )


def described(pair: Pair) -> str:
    return (
        f"even {pair.even.speed:8,.0f}   speed {pair.speed.speed:8,.0f}   ratio {pair.ratio:.2f}"
        f"   ideal {pair.even.ideal:.2f}   last shares {pair.speed.shares}"
        f"   test loss {pair.even.loss:.4f} {pair.speed.loss:.4f}"
    )


def show(pairs: list[Pair]) -> None:
    ratios, ideals = ([pair.ratio for pair in pairs], [pair.even.ideal for pair in pairs])
    median = statistics.median(ratios)
    print(
        f"shares=speed is {median:.2f} times shares=even ({min(ratios):.2f} to {max(ratios):.2f},"
        f" {len(pairs)} rounds), ideal {statistics.median(ideals):.2f}; target {TARGET}:"
        f" {'met' if median >= TARGET else 'not met'}"
    )


if __name__ == "__main__":
    sys.exit(main())
