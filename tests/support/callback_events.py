"""Values that callbacks are told, for tests: how a small run on the digits begins and goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from allstep.train.config.data_config import DataConfig
from allstep.train.config.run_config import OptimizerConfig, ResolvedConfig, RunConfig
from allstep.train.watch.events import Opening, Progress
from allstep.world import World

CONFIG = RunConfig(
    recipe="digits",
    epochs=2,
    batch=64,
    data=DataConfig(name="digits"),
    optimizer=OptimizerConfig(lr=0.05, base_batch=64),
).resolved(2)


def opening(
    out: Path = Path("/out"), num_workers: int = 2, config: ResolvedConfig = CONFIG, **others: Any
) -> Opening:
    """1,000 samples to train on."""
    made = Opening(
        config=config,
        world=World(0, num_workers, 0, num_workers, 0, 1, "h1", "allstep"),
        hosts=("h1",) * num_workers,
        threads=(1,) * num_workers,
        device="CPU",
        data="8x8 digits",
        data_folder=Path("/d"),
        classes=tuple("0123456789"),
        num_samples={"train": 1000, "validation": 143, "test": 360},
        peak_lr=0.05,
        parameters=1000,
        nbytes=4000,
        flop_per_sample=10**6,
        out=out,
    )
    return replace(made, **others)


def progress(samples: int, num_workers: int = 2, **others: Any) -> Progress:
    """A word after `samples`; every worker spends a quarter of its time on input."""
    seconds = {"input": 0.1, "compute": 0.2, "wait": 0.0, "update": 0.1}
    made = Progress(
        epoch=samples // 1000,
        samples=samples,
        loss=100.0 / samples,
        accuracy=0.5,
        lr=0.1,
        seconds=0.4,
        images_per_second=640.0,
        times={phase: [spent] * num_workers for phase, spent in seconds.items()},
        memory=[1000 * (rank + 1) for rank in range(num_workers)],
        batch=64,
        counts=[256 // num_workers] * num_workers,
    )
    return replace(made, **others)
