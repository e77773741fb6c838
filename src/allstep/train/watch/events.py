"""The events of a run, as plain values; `callback` passes them to callbacks.

```
Opening     before the first step: config, world, model, dataset
Progress    every `log_every` steps: loss, learning rate, seconds per phase and rank
Evaluated   after a validation
Result      at the end: the test score
```

The values are reduced over all ranks, so every rank computes them. Only rank 0 has callbacks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allstep.train.config.run_config import ResolvedConfig
from allstep.world import World


@dataclass(frozen=True)
class Score:
    """How good the model is on some samples, each counted once."""

    loss: float
    accuracy: float
    count: int
    top5: float = 0.0
    """The part of samples whose class is among the five likeliest."""


@dataclass(frozen=True)
class Opening:
    """What is known when training begins."""

    config: ResolvedConfig
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
    execution: str = "plain"
    """How the model is run, and in words why, where it was tried out."""
    precision: str = "float32"
    """Of the arithmetic in the model: what the run computes in, also where its config says auto."""
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
    """The model was tried on the validation part: at the end of an epoch, or more often, or less."""

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
    """A fixed sample of the training split in evaluation mode, with the weights that were tested:
    comparable with validation."""

    score: Score
    samples: int
    """Trained on when the weights were those: the validation score at this position has the same
    weights."""
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
    """Of the whole run, from the first batch to the test; of this part of it, where it was resumed.
    """
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
    """Seconds that steps waited for `saving` (copies for checkpoints) and `reporting` (the record,
    the screen), on rank 0."""
    num_bad: int = 0
    """Samples found bad and skipped."""
    train: TrainingScore | None = None
    """None with `overfit`, and where it was cut short or could not be read."""


class Pace:
    """How fast training went since the last evaluation, from the words about its progress: a run
    that was resumed in between knows only its own part."""

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
