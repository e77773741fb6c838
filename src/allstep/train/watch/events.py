"""What a run tells those who watch it, as plain values, and the watcher that keeps the run record.

```
run ── Opening, Progress, Evaluated, Result ──> Watchers ─┬─> Record        run.jsonl
                                                          ├─> Display       the terminal
                                                          ├─> TensorBoard   tensorboard/
                                                          └─> your own      a subclass of Watcher
```

Every rank computes these values (they are reduced over all ranks); rank 0 has watchers, the others have none. A watcher overrides
those methods of `Watcher` that it cares for. What goes wrong in one of them does not end the run: `Watchers` tells the others.
`saved` and `event` may come from another thread than the rest.
"""

import math
import platform
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from allstep._version import __version__
from allstep.machine import allowed_cores
from allstep.runlog import RunLog
from allstep.train.config.run_config import RunConfig
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
    precision: str = "float32"
    """Of the arithmetic in the net: what the run computes in, also where its config says auto."""
    precision_why: str = ""
    """Why it was chosen, where it was."""
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
class TrainingScore:
    """A fixed sample of the training split in evaluation mode, with the weights that were tested: comparable with validation."""

    score: Score
    samples: int
    """Trained on when the weights were those: the validation score at this position has the same weights."""
    seconds: float
    """That the evaluation took."""


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
    aside: Mapping[str, float] = field(default_factory=dict)
    """Seconds that steps waited for `saving` (copies for checkpoints) and `telling` (the record, the screen), on rank 0."""
    num_bad: int = 0
    """Samples found bad and skipped."""
    train: TrainingScore | None = None
    """None with `overfit`, and where it was cut short or could not be read."""


class Pace:
    """How fast training went since the last evaluation, from the words about its progress: a run that was resumed in between knows
    only its own part."""

    def __init__(self) -> None:
        self._samples = self._seconds = 0.0

    def add(self, progress: Progress) -> None:
        self._samples += progress.images_per_second * progress.seconds
        self._seconds += progress.seconds

    def take(self, evaluated: Evaluated) -> float:
        """Images per second up to this evaluation; 0 when nobody knows."""
        samples, seconds = self._samples, self._seconds
        self._samples = self._seconds = 0.0
        if not seconds:
            samples, seconds = evaluated.train.count, evaluated.seconds
        return samples / seconds if seconds else 0.0


class Watcher:
    """Is told how a run goes. Each method may be left as it is: it does nothing."""

    def start(self, opening: Opening) -> None:
        """Training begins, or goes on."""

    def progress(self, progress: Progress) -> None:
        """Some steps were done. Called every `log_every` steps, between two of them: be quick."""

    def evaluated(self, evaluated: Evaluated) -> None:
        """The validation part was scored."""

    def saved(self, samples: int, path: Path) -> None:
        """A checkpoint was written."""

    def event(self, text: str, **figures: Any) -> None:
        """Something worth telling, in words, with the figures behind it."""

    def end(self, result: Result) -> None:
        """The run is over. A run that fails does not come here."""

    def close(self) -> None:
        """Nothing more will be told, however the run went."""


class Watchers(Watcher):
    """Tells several watchers. One that fails is left out from then on; one whose disk is full, or the like, is kept: it may recover.

    Either is told to the others, once.
    """

    def __init__(self, watchers: Sequence[Watcher] = ()) -> None:
        self.watchers = list(watchers)
        self._failed: set[int] = set()

    def start(self, opening: Opening) -> None:
        self._tell("start", opening)

    def progress(self, progress: Progress) -> None:
        self._tell("progress", progress)

    def evaluated(self, evaluated: Evaluated) -> None:
        self._tell("evaluated", evaluated)

    def saved(self, samples: int, path: Path) -> None:
        self._tell("saved", samples, path)

    def event(self, text: str, **figures: Any) -> None:
        self._tell("event", text, **figures)

    def end(self, result: Result) -> None:
        self._tell("end", result)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, method: str, *values: Any, **figures: Any) -> None:
        for watcher in tuple(self.watchers):
            try:
                getattr(watcher, method)(*values, **figures)
            except Exception as error:
                self._note(watcher, error, is_last_word=method == "close")

    def _note(self, watcher: Watcher, error: Exception, is_last_word: bool) -> None:
        may_recover = isinstance(error, OSError)
        if not may_recover and watcher in self.watchers:
            self.watchers.remove(watcher)
        is_new, name = id(watcher) not in self._failed, type(watcher).__name__
        self._failed.add(id(watcher))
        if is_new and not is_last_word:
            after = "" if may_recover else "; it is told nothing more"
            self.event(f"{name} failed, the run goes on: {type(error).__name__}: {error}{after}")


class Record(Watcher):
    """Writes what it is told to the run record. Lines that the disk does not take are kept and tried again before the next one."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self._num_bad = 0
        self._lines: deque[tuple[str, dict[str, Any]]] = deque(maxlen=100_000)
        self._lock = threading.Lock()

    def start(self, opening: Opening) -> None:
        self._write(
            "start",
            version=__version__,
            config=opening.config.model_dump(mode="json"),
            world={**asdict(opening.world), "hosts": list(opening.hosts), "threads": list(opening.threads)},
            machine=_machine(opening.device),
            data={"found": str(opening.data_folder), **opening.num_samples},
            parameters=opening.parameters,
            bytes=opening.nbytes,
            flop_per_sample=opening.flop_per_sample,
            layout=opening.layout,
            precision=opening.precision,
            precision_why=opening.precision_why,
            share_weights=opening.share_weights,
            position=opening.position,
        )

    def progress(self, progress: Progress) -> None:
        known = {field.name: getattr(progress, field.name) for field in fields(progress)}
        times = known.pop("times")
        self._write("step", **times, **{name: value for name, value in known.items() if value is not None})

    def evaluated(self, evaluated: Evaluated) -> None:
        if evaluated.num_bad > self._num_bad:
            self._num_bad = evaluated.num_bad
            text = f"{evaluated.num_bad} samples were found bad and skipped so far; quarantine*.jsonl in the run folder lists them"
            self.event(text, epoch=evaluated.epoch, samples=evaluated.samples, num_bad=evaluated.num_bad)
        score = asdict(evaluated.validation)
        self._write(
            "eval",
            part="validation",
            epoch=evaluated.epoch,
            samples=evaluated.samples,
            best=evaluated.is_best,
            **score,
        )

    def saved(self, samples: int, path: Path) -> None:
        self._write("checkpoint", samples=samples, path=path.name)

    def event(self, text: str, **figures: Any) -> None:
        self._write("event", text=text, **figures)

    def end(self, result: Result) -> None:
        if (train := result.train) is not None:
            figures = {"samples": train.samples, "seconds": train.seconds, **asdict(train.score)}
            self._write("eval", part="train", **figures)
        self._write("eval", part="test", samples=result.samples, **asdict(result.test))
        self._write("end", **{**asdict(result), "out": str(result.out)})

    def close(self) -> None:
        try:
            self._write_all()
        finally:
            self.log.close()

    def _write(self, kind: str, **values: Any) -> None:
        self._lines.append((kind, {"time": self.log.now(), **values}))
        self._write_all()

    def _write_all(self) -> None:
        """All lines that wait, in their order."""
        with self._lock:
            while self._lines:
                kind, values = self._lines.popleft()
                try:
                    getattr(self.log, kind)(**_plain(values))
                except OSError:
                    self._lines.appendleft((kind, values))
                    raise


def _plain(value: Any) -> Any:
    """`value` as JSON has it. Numbers that are not finite become None: a gradient that overflowed is no reason to fail."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else str(value)


def _machine(device: str) -> dict[str, Any]:
    return {
        "device": device,
        "cores": allowed_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
