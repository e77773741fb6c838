"""The events of a run, as plain values; `callback` passes them to callbacks.

```
Opening       before the first step: config, world, model, dataset
Progress      every `log_every` steps: loss, learning rate, seconds per phase and rank
Synchronized  at a synchronization point of asynchronous training: figures by party
Evaluated     after a validation
Result        at the end: the test score
```

The values are reduced over all ranks, so every rank computes them. Only rank 0 has callbacks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from allstep.train.config.run_config import ResolvedConfig
from allstep.world import World


@dataclass(frozen=True)
class Score:
    """Quality of the model on some samples, each counted once.

    A metric is an attribute, too: `score.accuracy` is `score.metrics["accuracy"]`.
    """

    loss: float
    """Mean loss: the sum of the losses divided by the sum of the weights, usually the samples."""
    count: int
    """Number of samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures by name, which the task computes."""

    def __getattr__(self, name: str) -> float:
        # Copying and pickling ask for special methods before there are metrics.
        if name.startswith("__") or name not in self.metrics:
            raise AttributeError(f"the score has no metric {name!r}")
        return self.metrics[name]

    def of(self, name: str) -> float:
        """Return the metric `name`, or the loss; NaN for a metric of no samples."""
        if name == "loss":
            return self.loss
        return self.metrics[name] if self.count else math.nan

    def to_plain(self) -> dict[str, float]:
        """Return loss, count and metrics in one mapping, as in the run record."""
        return {"loss": self.loss, **self.metrics, "count": self.count}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Score":
        """Return the score of which `plain` is `to_plain`."""
        metrics = {name: plain[name] for name in plain if name not in ("loss", "count")}
        return cls(plain["loss"], plain["count"], metrics)


Direction = Literal["min", "max"]
"""Whether a figure is better if it is smaller or larger."""


@dataclass(frozen=True)
class Figures:
    """Which figures a task has, and how they are shown."""

    objective: str = "loss"
    """Name of the figure that decides which model is best."""
    direction: Direction = "min"
    unit: str = "samples"
    """What is counted: samples, images, sentences."""
    percent: tuple[str, ...] = ()
    """Metrics between 0 and 1 that are shown as percent."""
    hidden: tuple[str, ...] = ()
    """Metrics that are recorded and not shown on the terminal."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Names of metrics on the terminal, where they differ from the names in the record."""

    def text(self, name: str, value: float, digits: int = 1) -> str:
        """Return the value of a figure as text; `digits` are those of a percentage."""
        return f"{value:.{digits}%}" if name in self.percent else f"{value:.{digits + 3}g}"

    def label(self, name: str) -> str:
        """Return the name of a figure on the terminal."""
        return self.labels.get(name, name)

    def shown(self, score: Score) -> dict[str, float]:
        """Return the metrics of a score that are shown; the objective is the first of them."""
        names = [name for name in score.metrics if name not in self.hidden]
        first = [name for name in names if name == self.objective]
        return {name: score.metrics[name] for name in dict.fromkeys([*first, *names])}

    def is_better(self, score: Score, best: Score | None) -> bool:
        """Return whether `score` is better than `best`, the best so far; True for the first.

        Any figure is better than NaN.
        """
        if best is None:
            return True
        new, old = self._signed(score), self._signed(best)
        return new > old or (math.isnan(old) and not math.isnan(new))

    def reaches(self, score: Score, goal: float) -> bool:
        """Return whether `score` is at least as good as `goal`."""
        return self._signed(score) >= (goal if self.direction == "max" else -goal)

    def _signed(self, score: Score) -> float:
        value = score.of(self.objective)
        return value if self.direction == "max" else -value


@dataclass(frozen=True)
class Opening:
    """Facts about a run that are known before its first step."""

    config: ResolvedConfig
    world: World
    hosts: tuple[str, ...]
    """Host name of each rank."""
    threads: tuple[int, ...]
    """Number of compute threads of each rank."""
    device: str
    data: str
    """Name of the dataset."""
    data_folder: Path | str
    """Folder, pattern or file that the data was read from."""
    classes: tuple[str, ...]
    """Names of the classes; their numbers where they have no names."""
    num_samples: Mapping[str, int]
    """Number of samples of the splits train, validation and test."""
    peak_lr: float
    """Learning rate after the warm-up, scaled to the batch."""
    parameters: int
    """Number of parameters of the model."""
    nbytes: int
    """Bytes of the parameters, and so of the gradients of a step."""
    flop_per_sample: int
    """Floating-point operations of forward and backward; 0 if they could not be counted."""
    out: Path
    """Run folder."""
    execution: str = "plain"
    """How the model runs, and the reason if it was chosen by measurement."""
    precision: str = "float32"
    """Precision of the model's arithmetic, resolved where the config has `auto`."""
    precision_why: str = ""
    """Reason for the precision if it was chosen by `auto`, else ""."""
    share_weights: bool = False
    """True if the workers of a host share one copy of the weights."""
    undo_nbytes: int = 0
    """Bytes of weights in the undo copy that each update makes, in an elastic run with shared
    weights; the copy has the optimizer's state, too. 0 without an undo copy."""
    num_owners: int = 0
    """Number of workers that each update a part of shared weights, in the run or, in an elastic
    run, on each host; 0 without owners."""
    position: int = 0
    """Samples trained on before: more than 0 in a run that resumes."""
    num_unused: int = 0
    """Training samples that `data.use` leaves out."""
    notes: tuple[str, ...] = ()
    """Further notes for the user, one line each."""
    figures: Figures = Figures()
    """The figures of the task, and how they are shown."""


@dataclass(frozen=True)
class Progress:
    """Figures of the steps since the previous `Progress`."""

    epoch: int
    """Number of the current epoch, from 0."""
    samples: int
    """Samples trained on since the start of the run."""
    loss: float
    """Mean loss of these steps."""
    metrics: Mapping[str, float]
    """The objective of the task on the samples of these steps, if it is computed in training."""
    lr: float
    """Learning rate of the first parameter group."""
    seconds: float
    """Duration of these steps."""
    images_per_second: float
    """Samples trained on per second, over all workers."""
    times: Mapping[str, list[float]]
    """Seconds of the phases input, compute, wait and update, by rank."""
    memory: list[int]
    """Bytes of memory in use by each rank."""
    batch: int
    """Samples per update, over all workers."""
    counts: list[int] | None = None
    """Samples that each rank processed in these steps."""
    sent: list[int] | None = None
    """Bytes of gradients or weights that each rank gave to the others."""
    received: list[int] | None = None
    """Bytes that each rank took from them."""
    version: int | None = None
    """Updates of the weights since the start of the run; None between two synchronization points
    of asynchronous training, whose `sync` line has versions."""
    grad_norm: float | None = None
    """Norm of the mean gradient of the last step; None if not measured or not finite."""
    noise_scale: float | None = None
    """Gradient noise scale in samples; None if it is not measured or not finite."""
    trust: Mapping[str, float] | None = None
    """Trust ratio of each layer; None if the optimizer has none."""


@dataclass(frozen=True)
class PartyFigures:
    """What one party did since the previous synchronization point."""

    samples: int
    """Samples that it processed."""
    pushes: int
    """Updates of the weights that it made."""
    waited: float
    """Seconds that it waited before its pushes for other parties."""
    ages: Mapping[int, int]
    """Number of its pushes by the age of their gradient: the updates of others in between."""
    sent: int = 0
    """Bytes that it gave to the shared weights."""
    received: int = 0
    """Bytes that it took from them."""
    read: int = 0
    """Version of the weights from which its last gradient was computed."""
    made: int = 0
    """Version that its last push made."""


@dataclass(frozen=True)
class Synchronized:
    """A synchronization point of asynchronous training: all parties have the same weights."""

    samples: int
    """Samples trained on since the start of the run."""
    version: int
    """Updates of the weights since this process group started."""
    parties: Mapping[int, PartyFigures]
    """The parties by rank."""
    torn: int = 0
    """Updates that a lost party did not finish."""


@dataclass(frozen=True)
class Evaluated:
    """Scores after an evaluation on the validation split.

    The config key `evaluation.every` sets the interval in epochs (default: 1).
    """

    epoch: int
    """Number of epochs that have ended or begun: 1 at the end of the first."""
    samples: int
    """Samples trained on since the start of the run."""
    train: Score
    """Score on the samples trained on since the previous evaluation."""
    validation: Score
    """Score on the validation split."""
    seconds: float
    """Seconds of training since the previous evaluation, without evaluations."""
    is_best: bool = False
    """True if the validation score is better than all earlier ones."""
    num_bad: int = 0
    """Number of bad samples skipped since the start of the run."""


@dataclass(frozen=True)
class TrainingScore:
    """Score of a fixed sample of the training split in evaluation mode.

    It uses the weights that were tested, so it is comparable with the validation score.
    """

    score: Score
    samples: int
    """Position (samples trained on) of the weights.

    The validation score at this position is of the same weights.
    """
    seconds: float
    """Duration of this evaluation."""


@dataclass(frozen=True)
class Result:
    """How a run ended. Only the score `test` is meant to be published."""

    test: Score
    """Score on the test split."""
    validation: Score
    """Last score on the validation split."""
    images_per_second: float
    """Samples trained on per second, over all workers, without evaluations; 0 if none."""
    seconds_per_epoch: float
    """Seconds of an epoch at this speed, without evaluations; 0 if the speed is unknown."""
    seconds: float
    """Duration from the first batch to the test.

    For a resumed run: the duration since it was resumed.
    """
    out: Path
    """Run folder."""
    samples: int = 0
    """Samples trained on."""
    best: Score | None = None
    """Best score on the validation split."""
    chosen: str = "last"
    """Weights that were tested: "last" or "best"."""
    why: str = ""
    """Reason why the run ended before its last epoch; "" if it did not."""
    aside: Mapping[str, float] = field(default_factory=dict)
    """Seconds that steps of rank 0 waited for other work, by kind.

    The kinds are `saving` (copies for checkpoints) and `telling` (callbacks).
    """
    num_bad: int = 0
    """Number of bad samples skipped."""
    train: TrainingScore | None = None
    """None with `overfit`, or if the evaluation was interrupted or failed."""


class Pace:
    """Speed of training between two evaluations, from the `Progress` events.

    A run that was resumed in between counts only the time since then.
    """

    def __init__(self) -> None:
        self._samples = self._seconds = 0.0

    def add(self, progress: Progress) -> None:
        """Count the samples and seconds of `progress`."""
        self._samples += progress.images_per_second * progress.seconds
        self._seconds += progress.seconds

    def take(self, evaluated: Evaluated) -> float:
        """Return the images per second up to this evaluation, and reset; 0 if unknown."""
        samples, seconds = self._samples, self._seconds
        self._samples = self._seconds = 0.0
        if not seconds:
            samples, seconds = evaluated.train.count, evaluated.seconds
        return samples / seconds if seconds else 0.0
