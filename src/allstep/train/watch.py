"""What a run tells those who watch it, as plain values, and the watcher that keeps the run record.

Every rank computes these values (they are reduced over all ranks); rank 0 has watchers, the others have none. A watcher implements
the five methods of `Watcher`; `Record` here writes `run.jsonl`, `display` draws.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from allstep._version import __version__
from allstep.machine import allowed_cores
from allstep.runlog import RunLog
from allstep.train.config import RunConfig
from allstep.world import World


@dataclass(frozen=True)
class Score:
    """How good the net is on some samples, each counted once."""

    loss: float
    accuracy: float
    count: int


@dataclass(frozen=True)
class Opening:
    """What is known when training begins."""

    config: RunConfig
    world: World
    hosts: tuple[str, ...]
    """Of each rank."""
    threads: tuple[int, ...]
    """Of each rank."""
    device: str
    data: str
    data_folder: Path
    num_samples: Mapping[str, int]
    """Of the parts train, validation and test."""
    peak_lr: float
    parameters: int
    nbytes: int
    """Of the parameters, and so of the gradients of a step."""
    flop_per_sample: int
    """Forward and backward."""
    out: Path


@dataclass(frozen=True)
class Progress:
    """What happened since the last word."""

    epoch: int
    samples: int
    """Of the run so far."""
    loss: float
    accuracy: float
    lr: float
    seconds: float
    images_per_second: float
    times: Mapping[str, list[float]]
    """Seconds in input, compute, wait and update, each by rank."""


@dataclass(frozen=True)
class EpochEnd:
    """An epoch is over."""

    epoch: int
    samples: int
    train: Score
    validation: Score
    seconds: float
    """Of training, without validation."""
    num_bad: int = 0
    """Samples found bad and skipped since the run began."""


@dataclass(frozen=True)
class Result:
    """How the run ended. Only `test` is to be quoted."""

    test: Score
    validation: Score
    images_per_second: float
    seconds_per_epoch: float
    seconds: float
    """Of the whole run, from the first batch to the test."""
    out: Path
    num_bad: int = 0
    """Samples found bad and skipped."""


class Watcher(Protocol):
    """Is told how a run goes."""

    def start(self, opening: Opening) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def epoch(self, end: EpochEnd) -> None: ...
    def end(self, result: Result) -> None: ...
    def close(self) -> None: ...


class Record:
    """Writes what it is told to the run record."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self._num_bad = 0

    def start(self, opening: Opening) -> None:
        self.log.start(
            version=__version__,
            config=opening.config.model_dump(mode="json"),
            world={**asdict(opening.world), "hosts": list(opening.hosts), "threads": list(opening.threads)},
            machine=_machine(opening.device),
            data={"found": str(opening.data_folder), **opening.num_samples},
            parameters=opening.parameters,
            bytes=opening.nbytes,
            flop_per_sample=opening.flop_per_sample,
        )

    def progress(self, progress: Progress) -> None:
        fields = asdict(progress)
        self.log.step(**fields.pop("times"), **fields)

    def epoch(self, end: EpochEnd) -> None:
        if end.num_bad > self._num_bad:
            self._num_bad = end.num_bad
            text = f"{end.num_bad} samples were found bad and skipped so far; quarantine*.jsonl in the run folder lists them"
            self.log.event(text, epoch=end.epoch, samples=end.samples, num_bad=end.num_bad)
        self.log.eval(part="validation", epoch=end.epoch, samples=end.samples, **asdict(end.validation))

    def end(self, result: Result) -> None:
        self.log.eval(part="test", **asdict(result.test))
        fields = asdict(result)
        self.log.end(**{**fields, "out": str(result.out)})

    def close(self) -> None:
        self.log.close()


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "cores": allowed_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
