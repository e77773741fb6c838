"""The config of a run: one frozen value.

It has a section for each component that it configures; on the command line a key in a section is
written with a dot (`optimizer.lr`). Module `read` reads a config from recipes, files and overrides.
The complete config is written to the run folder as `config.yaml`; training from that file repeats
the run, with any number of workers.

**The defaults are those of textbooks**, tuned for no dataset: SGD with Nesterov momentum 0.9,
learning rate 0.1 at batch 256 (scaled linearly to another batch), weight decay 5e-4, a cosine after
a warm-up of 5% of the run, ResNet-18 with batch norms of momentum 0.1; no EMA, plain evaluation.
`RunConfig()` is a config without a recipe; it lacks only its data. A recipe states every key in
which it differs. docs/decisions.md has the reasons.

**The batch is global**: `batch` is the number of samples of one update over all workers.
`batch_per_worker` is an alternative to it, which `resolved` converts to `batch`.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from allstep.train.config.data_config import DataConfig
from allstep.train.config.number_types import (
    Batch,
    Count,
    Decay,
    Epochs,
    Kept,
    NotNegative,
    PerWorker,
    Positive,
    Seed,
    Share,
    Shares,
)
from allstep.train.config.section import Section
from allstep.train.config.sync_config import SyncConfig


class ModelConfig(Section):
    """The model and its norms."""

    name: str = "resnet18"
    """A model of `allstep.models`, or "package.module:factory" of your own, called with
    num_classes, shape, norm and the options."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the model's factory."""
    norm: Literal["none", "group", "batch", "sync", "ghost"] = "batch"
    """Kind of norm. Statistics of batch: over a worker's samples; of sync: over the samples of all
    workers; of ghost: over `ghost` samples."""
    norm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Momentum of the running statistics of batch norms."""
    norm_scale: bool = True
    """Whether batch norms learn a scale in addition to their shift."""
    ghost: Batch = 32
    """Samples of a ghost batch, for `norm` ghost."""


class OptimizerConfig(Section):
    """The optimizer and its learning rate, which belongs to the batch `base_batch`."""

    name: Literal["sgd", "adamw", "lars", "larc", "lamb", "novograd"] = "sgd"
    lr: Positive = 0.1
    """Peak learning rate at a batch of `base_batch`."""
    base_batch: Batch = 256
    """Samples of the batch for which `lr` was found."""
    scaling: Literal["linear", "square-root", "none"] = "linear"
    """Scaling rule of `lr` for another batch than `base_batch`."""
    momentum: Decay = 0.9
    nesterov: bool = True
    betas: tuple[Decay, Decay] | None = None
    """Betas of adamw, lamb and novograd; None uses the optimizer's default."""
    trust_coefficient: Positive | None = None
    """Trust coefficient of lars and larc; None uses the optimizer's default."""
    weight_decay: NotNegative = 5e-4
    decay_all: bool = False
    """Whether weight decay (and lars, larc, lamb scaling) also applies to biases and norms."""
    bias_lr: Positive = 1.0
    """Learning rate of biases and norms, as a multiple of the learning rate."""
    clip: Positive | None = None
    """Largest norm of the gradient; a larger gradient is scaled down to it. None: no limit."""
    noise: NotNegative = 0.0
    """Initial variance of Gaussian noise on the gradients; it falls as (1 + updates)^-0.55.
    0.01, 0.3 and 1.0 are usual."""
    noise_like: Batch | None = None
    """Weigh samples at random, so that the gradient is as noisy as that of a batch of this size,
    for any size of the batch."""

    def spelled_out(self) -> "OptimizerConfig":
        """Return the config with the optimizer's default for each value that is None."""
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
"""Defaults of each optimizer, so that config.yaml can show them; a test compares them with the
classes."""


class ScheduleConfig(Section):
    """The learning rate over the run, relative to its peak."""

    shape: Literal[
        "cosine", "linear", "constant", "step", "polynomial", "exponential", "one-cycle"
    ] = "cosine"
    warmup: NotNegative | None = None
    """Epochs of the warm-up to the peak; None is 5% of the run. One-cycle has its own rise and
    takes no warm-up."""
    warmup_kind: Literal["gradual", "constant", "none"] = "gradual"
    warmup_from: Share = 0.0
    """Learning rate at the start of the warm-up, as a fraction of the peak."""
    milestones: tuple[Positive, ...] = ()
    """Epochs (of `epochs`) at which the shape "step" lowers the learning rate; if empty, 1/3, 2/3
    and 8/9 of the run."""
    factor: Share = 0.1
    """Factor applied at each milestone of the shape "step"."""
    power: Positive = 2.0
    """Exponent of the shape "polynomial"."""
    end: Share = 0.0
    """Learning rate at the end of the run, as a fraction of the peak. 0 means 0.01 for exponential
    and 4e-6 for one-cycle; step and constant do not use it."""
    keep_updates: bool = False
    """Train more epochs, for as many updates as with `base_batch` (regime adaptation); milestones
    are stretched likewise."""

    @model_validator(mode="before")
    @classmethod
    def _with_its_own_rise(cls, values: Any) -> Any:
        """Set the default warm-up of one-cycle to 0; `config.check` rejects an explicit one."""
        is_cycle = isinstance(values, Mapping) and values.get("shape") == "one-cycle"
        return {**values, "warmup": 0.0} if is_cycle and values.get("warmup") is None else values


_USUAL_MILESTONES = (1 / 3, 2 / 3, 8 / 9)
"""Fractions of the run: epochs 30, 60 and 80 of 90 (Goyal et al. 2017)."""
_WARM_UP_DIVISOR = 20
"""The default warm-up is 1/20 of the epochs: 4.5 of 90 (Goyal et al. 2017: 5)."""
NEUTRAL = "defaults"
"""The value of `recipe` in a config that starts from the defaults of `RunConfig`, not a recipe."""


class EvaluationConfig(Section):
    """Evaluations on the validation split during the run, and the test at its end."""

    every: Positive = 1.0
    """Epochs between two evaluations."""
    flip: bool = False
    """Whether the prediction for an image is the mean of those for it and its mirror image."""
    patience: Count | None = None
    """End the run after this many evaluations without a new best one; None: never."""
    stop_at: Share | None = None
    """End the run as soon as the validation accuracy reaches this value; None: never."""
    weights: Literal["last", "best"] = "last"
    """Weights that are tested at the end: the last ones, or the best on the validation split."""


class EmaConfig(Section):
    """An exponential moving average of the weights, which is evaluated instead of the weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per update; None: no EMA."""
    every: Count = 5
    """Updates of the weights between two updates of the average."""


class GrowthConfig(Section):
    """A batch that grows during the run, instead of a learning rate that falls."""

    at: tuple[Positive, ...] = ()
    """Epochs at which the batch is multiplied by `factor`."""
    factor: PerWorker = 2
    by_noise: bool = False
    """Multiply whenever the measured noise scale is above the batch, instead of at given epochs."""
    max: Batch | None = None
    """Largest batch; None: the samples of an epoch."""


class SaveConfig(Section):
    """The times at which checkpoints are written."""

    seconds: Positive | None = 300.0
    """Seconds between two checkpoints within an epoch; None: none by time."""
    epochs: Positive | None = 1.0
    """Epochs between two checkpoints; None: only the last and the best."""
    keep: Kept = 3
    """Keep this many recent checkpoints, plus the best one."""


class RunConfig(Section):
    """Everything that determines what a run computes."""

    recipe: str = NEUTRAL
    """The recipe that the config started from."""
    seed: Seed = 0
    """Seed of all random numbers of the run."""
    epochs: Epochs = 30
    """Passes over the training split."""
    batch: Batch | None = None
    """Samples of one update, over all workers; None: `usual_batch`, which is
    `optimizer.base_batch`, or less for a small dataset."""
    batch_per_worker: PerWorker | None = None
    """Samples of one update per worker; an alternative to `batch`."""
    accumulation: PerWorker = 1
    """Number of micro-batches in which a worker computes its share: less memory, same result."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of a target that is spread over all classes in training."""
    overfit: Batch | None = None
    """Train on this many samples only, without augmentation, and evaluate on the same: a first test
    of any model. None: train on all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Precision of the model's arithmetic; weights are float32, except in float64. auto: bfloat16
    where the processor computes in it, else float32."""
    execution: Literal["plain", "channels-last", "compiled", "auto"] = "channels-last"
    """Execution mode of the model; "auto" measures a few steps in each and uses the fastest."""
    share_weights: bool | Literal["auto"] = "auto"
    """Whether the workers of a host share one copy of the weights; "auto": where it is faster."""
    shares: Shares = "even"
    """Parts of the batch by worker: even, by measured speed, or numbers such as [3, 1]."""
    log_every: Count = 10
    """Steps between two lines of the run record."""
    noise_scale: bool = False
    """Whether the gradient noise scale is measured and logged."""
    sync: SyncConfig = SyncConfig()
    """When the workers exchange what they have learned."""
    data: DataConfig = DataConfig()
    """The dataset, its splits, and the transforms of its images."""
    model: ModelConfig = ModelConfig()
    """The model and its norms."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its learning rate."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the run, relative to its peak."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluations during the run, and the test at its end."""
    ema: EmaConfig = EmaConfig()
    """The exponential moving average of the weights."""
    growth: GrowthConfig = GrowthConfig()
    """Growth of the batch during the run."""
    save: SaveConfig = SaveConfig()
    """The times at which checkpoints are written."""

    def resolved(self, num_workers: int) -> "ResolvedConfig":
        """Return the config with batch, warm-up and the optimizer's default values filled in.

        `num_workers` is the number of workers, which determines the batch if the config has
        `batch_per_worker`.
        """
        batch = (
            self.batch or (self.batch_per_worker or 0) * num_workers or self.optimizer.base_batch
        )
        warmup = self.schedule.warmup
        if warmup is None:
            warmup = _num_epochs(self, batch) / _WARM_UP_DIVISOR
        known: dict[str, Any] = {
            "batch": batch,
            "batch_per_worker": None,
            "optimizer": self.optimizer.spelled_out(),
            "schedule": self.schedule.model_copy(update={"warmup": warmup}),
        }
        return ResolvedConfig(**{**dict(self), **known})

    @property
    def title(self) -> str:
        """The name of the run: its recipe, or without a recipe its model and data."""
        if self.recipe != NEUTRAL:
            return self.recipe
        return f"{self.model.name.rpartition(':')[2]} on {self.data.name}"

    def to_yaml(self) -> str:
        """Return the config as YAML, which `read_config` reads back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


class ResolvedConfig(RunConfig):
    """A config with nothing left to fill in: it has a batch, a warm-up and optimizer values.

    `RunConfig.resolved` creates one. Code that computes takes this type; code that only reads,
    shows or changes keys takes `RunConfig`.
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
        """Epochs of the run; more than `epochs` for a large batch with `schedule.keep_updates`."""
        return _num_epochs(self, self.batch)

    @property
    def warmup(self) -> float:
        """Epochs of the warm-up; 0 if `warmup_kind` is "none"."""
        return 0.0 if self.schedule.warmup_kind == "none" else self.warmup_epochs

    @property
    def warmup_epochs(self) -> float:
        """The value of `schedule.warmup`, even if `warmup_kind` is "none"."""
        return self.schedule.warmup or 0.0

    @property
    def milestones(self) -> list[float]:
        """Epochs from the start of the run at which the shape "step" lowers the learning rate."""
        usual = [fraction * self.epochs for fraction in _USUAL_MILESTONES]
        milestones = self.schedule.milestones or usual
        return [each * (self.num_epochs / self.epochs) for each in milestones]


def _num_epochs(config: RunConfig, batch: int) -> int:
    factor = max(1.0, batch / config.optimizer.base_batch) if config.schedule.keep_updates else 1.0
    return math.ceil(config.epochs * factor)
