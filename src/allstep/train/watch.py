"""What a run tells those who watch it, as plain values, and the watcher that keeps the run record.

Every rank computes these values (they are reduced over all ranks); rank 0 has watchers, the others have none. A watcher implements
the methods of `Watcher`; `Record` here writes `run.jsonl`, `display` draws, `tensorboard` writes events.
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
    top5: float = 0.0
    """The part of samples whose class is among the five likeliest."""


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
    data_folder: Path | str
    classes: tuple[str, ...]
    num_samples: Mapping[str, int]
    """Of the parts train, validation and test."""
    peak_lr: float
    parameters: int
    nbytes: int
    """Of the parameters, and so of the gradients of a step."""
    flop_per_sample: int
    """Forward and backward."""
    out: Path
    layout: str = "plain"
    """How the net is run, and in words why, where it was tried out."""
    share_weights: bool = False
    position: int = 0
    """Samples that were seen before: more than 0 in a run that goes on."""
    notes: tuple[str, ...] = ()
    """What else the user should know, a line each."""


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
    memory: list[int]
    """Bytes that each rank holds."""
    batch: int
    """Samples of an update."""
    grad_norm: float | None = None
    noise_scale: float | None = None
    trust: Mapping[str, float] | None = None
    """Trust ratio of each layer, where the optimizer has them."""


@dataclass(frozen=True)
class Evaluated:
    """The net was tried on the validation part: at the end of an epoch, or more often, or less."""

    epoch: int
    """Epochs of the run that are over, or begun: 1 at the end of the first."""
    samples: int
    train: Score
    """On the samples trained on since the last evaluation."""
    validation: Score
    seconds: float
    """Of training since then, without evaluations."""
    is_best: bool = False
    """Whether no validation accuracy was higher before."""
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
    """Of the whole run, from the first batch to the test; of this part of it, where it was resumed."""
    out: Path
    samples: int = 0
    """Trained on."""
    best: Score | None = None
    """The best on the validation part."""
    chosen: str = "last"
    """Which weights were tested: the last or the best."""
    why: str = ""
    """Why the run ended before its last epoch, if it did."""
    num_bad: int = 0
    """Samples found bad and skipped."""


class Watcher(Protocol):
    """Is told how a run goes."""

    def start(self, opening: Opening) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def evaluated(self, evaluated: Evaluated) -> None: ...
    def saved(self, samples: int, path: Path) -> None: ...
    def event(self, text: str, **figures: Any) -> None: ...
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
            layout=opening.layout,
            share_weights=opening.share_weights,
            position=opening.position,
        )

    def progress(self, progress: Progress) -> None:
        fields = asdict(progress)
        known = {name: value for name, value in fields.items() if value is not None}
        self.log.step(**known.pop("times"), **known)

    def evaluated(self, evaluated: Evaluated) -> None:
        if evaluated.num_bad > self._num_bad:
            self._num_bad = evaluated.num_bad
            text = f"{evaluated.num_bad} samples were found bad and skipped so far; quarantine*.jsonl in the run folder lists them"
            self.log.event(text, epoch=evaluated.epoch, samples=evaluated.samples, num_bad=evaluated.num_bad)
        fields = asdict(evaluated.validation)
        self.log.eval(part="validation", epoch=evaluated.epoch, samples=evaluated.samples, best=evaluated.is_best, **fields)

    def saved(self, samples: int, path: Path) -> None:
        self.log.checkpoint(samples=samples, path=path.name)

    def event(self, text: str, **figures: Any) -> None:
        self.log.event(text, **figures)

    def end(self, result: Result) -> None:
        self.log.eval(part="test", samples=result.samples, **asdict(result.test))
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
