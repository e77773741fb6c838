"""What a run is: one frozen value.

A config belongs to the thing it configures, so it has sections; on the command line a key in a
section is written with a dot (`optimizer.lr`). `source` reads a config from recipes, files and
words. The whole of it is written to the run folder as `config.yaml`; training from that file
repeats the run, with any number of workers.

**The defaults are the textbook's**, tuned for no dataset: SGD with Nesterov momentum 0.9, learning
rate 0.1 at batch 256 (scaled linearly to another batch), weight decay 5e-4, a cosine after a
warm-up of 5% of the run, ResNet-18 with batch norms of momentum 0.1; no weight averaging, plain
evaluation. `RunConfig()` is a config without a recipe; it lacks only its data. A recipe states
every key in which it differs. docs/decisions.md has the reasons.

**The batch is global**: `batch` is the number of samples of one update over all workers.
`batch_per_worker` is the other way of saying it, and `resolved` turns it into the first.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from allstep.data.image.limit import MAX_PIXELS
from allstep.train.config.number_types import (
    Batch,
    Classes,
    Count,
    Decay,
    Epochs,
    Kept,
    Label,
    Loaders,
    NotNegative,
    PerWorker,
    Pixels,
    Positive,
    Real,
    Seed,
    Share,
    Whole,
)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Which samples, and what is done to an image before the model sees it."""

    name: str = ""
    """A dataset known by name (`allstep data get --list`), or any word for data of your own, whose
    place `train` gives; by default the last part of that place."""
    folder: Path | None = None
    """Where the files of a named set are; None looks in the usual places."""
    train: str | None = None
    """Data of your own: a folder, pattern or file of whatever `open_source` reads, or
    "synthetic:1000x224x224"."""
    validation: Whole | str | None = None
    """Samples held out of the training set, or the place of a validation set; None takes 5,000, or
    a tenth of a small set."""
    test: Whole | str | None = None
    """The place of the test set, or the samples held out for it; None is the named set's own, else
    the same number as for validation."""
    split_seed: Seed = 0
    """Which samples are held out: not the run's seed, so that runs can be compared."""
    augment: str = "none"
    """What happens to an image in training: operations of `allstep.data.augment`, as in
    "PadAndCrop(32, pad=4), Flip()", or a preset."""
    prepare: str = "none"
    """What happens to an image in evaluation, as in "CentreCrop(224)"."""
    mix: str = "none"
    """What happens to a whole batch in training: "Mixup(0.2)", "Cutmix(1.0)"."""
    mean: tuple[Real, ...] | None = None
    """Of each channel, from 0 to 255: taken off. None measures it on the training set."""
    std: tuple[Positive, ...] | None = None
    """Of each channel: divided by. None measures it on the training set."""
    labels_from: Label | None = None
    """The label of the first class in TFRecords; None: 1 where they are called image/class/label,
    as ImageNet's are, else 0."""
    num_classes: Classes | None = None
    """How many classes there are, where the data does not say."""
    workers: Loaders | Literal["auto"] = "auto"
    """Threads or processes of each rank that make images ready; "auto" measures."""
    strict: bool = False
    """The first bad sample ends the run, rather than being skipped and listed in the run folder."""
    budget: Whole | None = None
    """Bad samples of a part that each worker may skip; None: 100, or 0.1% of a large set."""
    max_pixels: Pixels = MAX_PIXELS
    """Pixels of the largest image that is decoded; a larger one is a bad sample."""

    @model_validator(mode="before")
    @classmethod
    def _named_after_its_place(cls, values: Any) -> Any:
        if (
            not isinstance(values, Mapping)
            or values.get("name")
            or not isinstance(values.get("train"), str)
        ):
            return values
        return {**values, "name": _place_name(values["train"])}


def _place_name(where: str) -> str:
    """Return the last part of a place that is no pattern: "photos" for "photos/" and
    "photos/*.tar"."""
    parts = [part for part in where.split("/") if part.strip(".~") and not set(part) & set("*?[{")]
    return parts[-1].partition(":")[0] if parts else "data"


class ModelConfig(_Section):
    """Which model."""

    name: str = "resnet18"
    """One of `allstep.models`, or "package.module:factory" of your own, called with num_classes,
    shape, norm and the options."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """What else it is called with."""
    norm: Literal["none", "group", "batch", "sync", "ghost"] = "batch"
    """batch: over a worker's samples; sync: over those of all workers; ghost: over `ghost` samples.
    """
    norm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Of a batch norm's running statistics."""
    norm_scale: bool = True
    """Whether batch norms learn a scale beside their shift."""
    ghost: Batch = 32


class OptimizerConfig(_Section):
    """The optimizer; its rate is given for the batch it was found with."""

    name: Literal["sgd", "adamw", "lars", "larc", "lamb", "novograd"] = "sgd"
    lr: Positive = 0.1
    base_batch: Batch = 256
    scaling: Literal["linear", "square-root", "none"] = "linear"
    momentum: Decay = 0.9
    nesterov: bool = True
    betas: tuple[Decay, Decay] | None = None
    """Of adamw, lamb and novograd; None: the optimizer's own."""
    trust_coefficient: Positive | None = None
    """Of lars and larc; None: the optimizer's own."""
    weight_decay: NotNegative = 5e-4
    decay_all: bool = False
    """Whether biases and norms are decayed (and scaled by lars, larc, lamb) like the rest."""
    bias_lr: Positive = 1.0
    """The rate of biases and norms, as a multiple of the rate."""
    clip: Positive | None = None
    """The largest norm of a gradient; a larger one is scaled down to it."""
    noise: NotNegative = 0.0
    """Variance of Gaussian noise on the gradients at the start; it fades as (1 + updates)^-0.55.
    0.01, 0.3 and 1.0 are usual."""
    noise_like: Batch | None = None
    """Weigh samples at random, so that the gradient is as noisy as that of a batch of so many,
    however large the batch has grown."""

    def spelled_out(self) -> "OptimizerConfig":
        """The same with the optimizer's own values where none are given."""
        own = {
            key: value
            for key, value in OWN.get(self.name, {}).items()
            if getattr(self, key) is None
        }
        return self.model_copy(update=own)


OWN: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999)},
    "lamb": {"betas": (0.9, 0.999)},
    "novograd": {"betas": (0.95, 0.98)},
    "lars": {"trust_coefficient": 0.001},
    "larc": {"trust_coefficient": 0.02},
}
"""What optimizers take when nobody says otherwise, so that config.yaml can show it; a test holds it
against the classes."""


class ScheduleConfig(_Section):
    """How the rate goes over the run."""

    shape: Literal[
        "cosine", "linear", "constant", "step", "polynomial", "exponential", "one-cycle"
    ] = "cosine"
    warmup: NotNegative | None = None
    """Epochs before the learning rate is at its peak; None: 5% of the run. One-cycle has a rise of
    its own, and none of these."""
    warmup_kind: Literal["gradual", "constant", "none"] = "gradual"
    warmup_from: Share = 0.0
    """The rate at which the warm-up begins, as a part of the peak."""
    milestones: tuple[Positive, ...] = ()
    """Epochs (of `epochs`) at which the shape "step" lowers the rate; none given: 1/3, 2/3 and 8/9
    of the run."""
    factor: Share = 0.1
    """By which it does."""
    power: Positive = 2.0
    """Of the shape "polynomial"."""
    end: Share = 0.0
    """Where the rate ends, as a part of the peak. 0 is 0.01 for exponential and 4e-6 for one-cycle;
    step and constant do not use it."""
    keep_updates: bool = False
    """Train so many epochs longer that there are as many updates as with base_batch (regime
    adaptation). Milestones move with it."""

    @model_validator(mode="before")
    @classmethod
    def _with_its_own_rise(cls, values: Any) -> Any:
        """The usual warm-up is not for one-cycle; one that is asked for stays, and `config.check`
        refuses it."""
        is_cycle = isinstance(values, Mapping) and values.get("shape") == "one-cycle"
        return {**values, "warmup": 0.0} if is_cycle and values.get("warmup") is None else values


_USUAL_MILESTONES = (1 / 3, 2 / 3, 8 / 9)
"""Fractions of the run: epochs 30, 60 and 80 of 90 (Goyal et al. 2017)."""
_WARM_UP_PART = 20
"""A run that names no warm-up takes 1/20 of its epochs for it: 4.5 of 90 (Goyal et al. 2017: 5)."""
_ENOUGH_UPDATES = 16
"""In an epoch of a run that names no batch: 30 epochs are then 480 updates or more."""
_SMALLEST_BATCH = 8
"""Below it the statistics of batch norms are too noisy."""
NEUTRAL = "defaults"
"""What `recipe` is in a config that starts from no recipe, but from the defaults of `RunConfig`."""


class EvaluationConfig(_Section):
    """When the model is tried on the validation part, and how."""

    every: Positive = 1.0
    """Epochs between two evaluations."""
    flip: bool = False
    """Whether an image's score is the mean of its own and its mirror image's."""
    patience: Count | None = None
    """End after so many evaluations without a better one."""
    stop_at: Share | None = None
    """End as soon as the validation accuracy is that high."""
    weights: Literal["last", "best"] = "last"
    """Which weights are tested at the end: the last ones, or the best on the validation part."""


class EmaConfig(_Section):
    """An exponential moving average of the weights, which is what is evaluated then."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Per update; None: no average."""
    every: Count = 5
    """Updates between two looks at the weights."""


class GrowthConfig(_Section):
    """A batch that grows during the run, instead of a rate that falls."""

    at: tuple[Positive, ...] = ()
    """Epochs at which the batch is multiplied."""
    factor: PerWorker = 2
    by_noise: bool = False
    """Multiply whenever the measured noise scale is above the batch, rather than at given epochs.
    """
    max: Batch | None = None
    """The largest batch."""


class SaveConfig(_Section):
    """When checkpoints are written."""

    seconds: Positive | None = 300.0
    """Between two of them, within an epoch; None: none."""
    epochs: Positive | None = 1.0
    """Between two of them; None: none but the last."""
    keep: Kept = 3
    """The last so many stay, and the best."""


class RunConfig(_Section):
    """All that decides what a run computes."""

    recipe: str = NEUTRAL
    """The recipe that the config started from."""
    seed: Seed = 0
    epochs: Epochs = 30
    batch: Batch | None = None
    """Samples of one update, over all workers; None:

    `usual_batch`, base_batch or less for a small dataset.
    """
    batch_per_worker: PerWorker | None = None
    accumulation: PerWorker = 1
    """Pieces in which a worker computes its share, one after the other: less memory, same result.
    """
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    overfit: Batch | None = None
    """Train on so many samples only, without augmentation, and evaluate on the same: the first test
    of any model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of the arithmetic in the model; the weights are float32 in all but the last. auto: bfloat16
    where the processor computes in it, else float32."""
    execution: Literal["plain", "channels-last", "compiled", "auto"] = "channels-last"
    """How the model is run; "auto" tries each for a few steps and takes the fastest."""
    share_weights: bool | Literal["auto"] = "auto"
    """One copy of the weights for all workers of a host; "auto": where it is right and faster."""
    log_every: Count = 10
    """Steps between two lines of the run record."""
    noise_scale: bool = False
    """Whether the gradient noise scale is measured and logged."""
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    ema: EmaConfig = EmaConfig()
    growth: GrowthConfig = GrowthConfig()
    save: SaveConfig = SaveConfig()

    def resolved(self, num_workers: int) -> "ResolvedConfig":
        """Return the same run with its batch, its warm-up and its optimizer's own values filled in.

        num_workers: how many share a batch; it counts where the config has `batch_per_worker`.
        """
        batch = (
            self.batch or (self.batch_per_worker or 0) * num_workers or self.optimizer.base_batch
        )
        warmup = self.schedule.warmup
        if warmup is None:
            warmup = _num_epochs(self, batch) / _WARM_UP_PART
        known: dict[str, Any] = {
            "batch": batch,
            "batch_per_worker": None,
            "optimizer": self.optimizer.spelled_out(),
            "schedule": self.schedule.model_copy(update={"warmup": warmup}),
        }
        return ResolvedConfig(**{**dict(self), **known})

    @property
    def title(self) -> str:
        """What the run is called: its recipe, or without one its model and data."""
        if self.recipe != NEUTRAL:
            return self.recipe
        return f"{self.model.name.rpartition(':')[2]} on {self.data.name}"

    def to_yaml(self) -> str:
        """As a file that `read_config` reads back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class ResolvedConfig(RunConfig):
    """A run for which nothing is left to fill in: it has a batch, and the optimizer's own values.

    `RunConfig.resolved` makes one. Whatever computes takes this type; what only reads, shows or
    changes keys takes the other.
    """

    batch: Batch
    batch_per_worker: None = None

    @model_validator(mode="after")
    def _is_filled_in(self) -> "ResolvedConfig":
        if self.schedule.warmup is None or self.optimizer.spelled_out() != self.optimizer:
            raise ValueError(
                "expected a warm-up and the optimizer's own values: see RunConfig.resolved"
            )
        return self

    @property
    def num_epochs(self) -> int:
        """Epochs of the run; more than `epochs` where a large batch keeps its updates
        (`schedule.keep_updates`)."""
        return _num_epochs(self, self.batch)

    @property
    def warmup(self) -> float:
        """Epochs of the warm-up; 0 where there is none."""
        return 0.0 if self.schedule.warmup_kind == "none" else self.warmup_epochs

    @property
    def warmup_epochs(self) -> float:
        """What `schedule.warmup` says, also where `warmup_kind` is "none"."""
        return self.schedule.warmup or 0.0

    @property
    def milestones(self) -> list[float]:
        """Epochs of this run, from its start, at which the shape "step" lowers the rate."""
        milestones = self.schedule.milestones or [part * self.epochs for part in _USUAL_MILESTONES]
        return [each * (self.num_epochs / self.epochs) for each in milestones]


def _num_epochs(config: RunConfig, batch: int) -> int:
    factor = max(1.0, batch / config.optimizer.base_batch) if config.schedule.keep_updates else 1.0
    return math.ceil(config.epochs * factor)


def usual_batch(base_batch: int, num_train: int) -> int:
    """Return the batch of a run that names none: `base_batch`, halved until an epoch has 16
    updates.

    num_train: samples of an epoch. It is not halved below 8, and never larger than the dataset. The
    learning rate scales with it.
    """
    batch = base_batch
    while batch // 2 >= _SMALLEST_BATCH and batch * _ENOUGH_UPDATES > num_train:
        batch //= 2
    return max(1, min(batch, num_train))
