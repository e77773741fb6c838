"""Records and run folders that were made up: every figure is chosen, so a test knows what a reader
must find."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image

from allstep.runlog import RunRecord
from allstep.train import RECIPES

SIZE = 1000
"""Samples of the training set."""
BEGAN = 1_767_225_600.0
CLASSES = ["shirt", "coat", "dress", "ankle boot"]
FIELDS = {f"{field.name.rstrip('s')}": field.name for field in fields(RunRecord)}


def record(lines: list[dict[str, Any]]) -> RunRecord:
    """Lines as `allstep.runlog.read` gives them."""
    kinds: dict[str, list[dict[str, Any]]] = {name: [] for name in FIELDS.values()}
    for line in lines:
        kinds[FIELDS[line["kind"]]].append(line)
    return RunRecord(**{name: tuple(found) for name, found in kinds.items()})


def lines(
    *,
    epochs: int = 8,
    per_epoch: int = 10,
    workers: int = 2,
    train_error: Callable[[float], float] = lambda epoch: 0.05,
    validation_error: Callable[[float], float] = lambda epoch: 0.06,
    loss: Callable[[int], float] = lambda line: 1.0 / (1 + line / 10),
    validation_loss: Callable[[float], float] = lambda epoch: 0.3,
    times: Mapping[str, list[float]] | None = None,
    extra: Callable[[int], dict[str, Any]] = lambda line: {},
    end: bool = True,
    sample: bool = True,
    sample_error: float | None = None,
    count: int = 10_000,
    seconds: float = 0.5,
    began: float = BEGAN,
    points: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """A run in which nothing stands out, unless it is told otherwise: each line of steps is 0.5 s
    and 100 samples.

    sample: whether an ended run has evaluated a training sample, as all do today; its error is
    `sample_error`, else the last `train_error`. points: the `parties` of synchronization points.
    """
    times = times or {"input": [0.01], "compute": [0.4], "wait": [0.05], "update": [0.04]}
    by_rank = {phase: (values * workers)[:workers] for phase, values in times.items()}
    made = [start(workers, epochs, began)]
    clock = began
    for line in range(epochs * per_epoch):
        clock += seconds
        samples = SIZE * (line + 1) // per_epoch
        epoch = samples / SIZE
        step = {
            "samples": samples,
            "loss": loss(line),
            "accuracy": 1 - train_error(epoch),
            "lr": 0.1 * math.cos(1.5 * line / epochs / per_epoch),
        }
        made.append(
            {"kind": "step", "time": clock, **step, "seconds": seconds, **by_rank, **extra(line)}
        )
        if samples % SIZE == 0:
            score = {
                "loss": validation_loss(epoch),
                "accuracy": 1 - validation_error(epoch),
                "count": count,
            }
            made.append(
                {"kind": "eval", "time": clock, "part": "validation", "samples": samples, **score}
            )
    if end and sample:
        error = train_error(epochs) if sample_error is None else sample_error
        score = {"loss": 0.28, "accuracy": 1 - error, "count": count}
        made.append(
            {
                "kind": "eval",
                "time": clock,
                "part": "train",
                "samples": SIZE * epochs,
                "seconds": 0.1,
                **score,
            }
        )
    made += [
        {"kind": "sync", "time": clock, "samples": number, "parties": each}
        for number, each in enumerate(points)
    ]
    if end:
        test = {"loss": 0.3, "accuracy": 0.93, "count": count}
        made.append({"kind": "eval", "time": clock, "part": "test", **test})
        speed = SIZE / per_epoch / seconds
        made.append(
            {
                "kind": "end",
                "time": clock,
                "test": test,
                "images_per_second": speed,
                "seconds_per_epoch": SIZE / speed,
            }
        )
    return made


def start(workers: int, epochs: int, began: float = BEGAN) -> dict[str, Any]:
    config = {**RECIPES["digits"]().model_dump(mode="json"), "epochs": epochs}
    hosts = [f"h{rank // 2}" for rank in range(workers)]
    return {
        "kind": "start",
        "time": began,
        "version": "0.1.0",
        "config": config,
        "world": {"size": workers, "hosts": hosts, "threads": [1] * workers},
        "machine": {"device": "CPU", "cores": 2, "system": "Linux", "python": "3.11"},
        "data": {"train": SIZE, "validation": 100, "test": 360},
        "parameters": 13706,
        "bytes": 54824,
        "flop_per_sample": 532224,
    }


def write(folder: Path, made: list[dict[str, Any]]) -> Path:
    """A run folder with these lines."""
    folder.mkdir(parents=True)
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    return folder


def write_rich(folder: Path, **options: Any) -> Path:
    """A run folder with all that a report can show: trust ratios, mistakes, checkpoints, bad
    samples, events."""
    model = [f"layers.{i}.weight" for i in range(12)]

    def extra(line: int) -> dict[str, Any]:
        trust = {
            name: 1e-3 * (1 + i) * (1.5 + math.sin(line / 9 + i)) for i, name in enumerate(model)
        }
        return {"trust": trust, "grad_norm": 3 / (1 + line / 20), "noise_scale": 50.0 + line}

    made = lines(extra=extra, **options)
    made.append(
        {"kind": "event", "time": made[-1]["time"], "text": "<b>weights</b> agree on all workers"}
    )
    write(folder, made)
    (folder / "config.yaml").write_text("recipe: digits\n")
    (folder / "quarantine.jsonl").write_text(
        '{"number": 17, "file": "a", "offset": 3, "reason": "cut short"}\n{"num'
    )
    manifest = {
        "format": 1,
        "files": {"weights.safetensors": {"nbytes": 54824, "sha256": "ab" * 32}},
    }
    for samples in (1000, 8000):
        checkpoint = folder / "checkpoints" / f"{samples:012}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    write_mistakes(folder / "mistakes")
    return folder


def write_mistakes(folder: Path, number: int = 6) -> None:
    folder.mkdir()
    counts = [[90, 8, 2, 0], [11, 88, 1, 0], [3, 2, 95, 0], [0, 0, 0, 100]]
    (folder / "confusion.json").write_text(json.dumps({"classes": CLASSES, "counts": counts}))
    entries = []
    for i in range(number):
        image = Image.new("L", (28, 28))
        image.putdata([(x * (i + 2) + y * 7) % 256 for y in range(28) for x in range(28)])
        image.save(folder / f"{i:04}.png")
        entries.append(
            {
                "file": f"{i:04}.png",
                "label": i % 4,
                "predicted": CLASSES[(i + 1) % 4],
                "probability": 0.99 - i / 50,
                "number": 40 + i,
            }
        )
    (folder / "mistakes.json").write_text(json.dumps(entries))
