"""What a run is: one frozen value.

A config belongs to the thing it configures, so it has sections; on the command line a key in a section is written with a dot
(`optimizer.lr`). `source` reads a config from recipes, files and words. The whole of it is written to the run folder as `config.yaml`;
training from that file repeats the run, with any number of workers.

**The batch is global**: `batch` is the number of samples of one update over all workers. `batch_per_worker` is the other way of saying
it, and `resolved` turns it into the first.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from allstep.errors import ConfigError

Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Section):
    """Which samples."""

    name: str
    folder: Path | None = None
    """Where the files are; None looks in the usual places."""
    validation: Whole | None = None
    """Samples held out of the training set; None takes 5,000, or a tenth of a small set."""
    split_seed: Whole = 0
    """Which ones: not the run's seed, so that runs can be compared."""
    strict: bool = False
    """The first bad sample ends the run, rather than being skipped and listed in the run folder."""
    budget: Whole | None = None
    """Bad samples of a part that each worker may skip; None: 100, or 0.1% of a large set."""


class ModelConfig(_Section):
    """Which net."""

    widths: Annotated[tuple[Count, ...], Field(min_length=1)] = (16, 32, 64)
    hidden: Count = 128
    norm: Literal["none", "group"] = "none"


class OptimizerConfig(_Section):
    """SGD with momentum, its rate given for the batch it was found with."""

    lr: Positive = 0.1
    base_batch: Count = 128
    scaling: Literal["linear", "none"] = "linear"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True
    weight_decay: NotNegative = 5e-4


class ScheduleConfig(_Section):
    """How the rate goes over the run."""

    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: NotNegative = 0.5
    """Epochs over which the rate rises to its peak."""


class RunConfig(_Section):
    """All that decides what a run computes."""

    recipe: str
    seed: Whole = 0
    epochs: Count = 1
    batch: Count | None = None
    batch_per_worker: Count | None = None
    accumulation: Count = 1
    """Pieces in which a worker computes its share, one after the other: less memory, same result."""
    log_every: Count = 10
    """Steps between two lines of the run record."""
    data: DataConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    def resolved(self, num_workers: int) -> "RunConfig":
        """The same run with its global batch spelled out."""
        batch = self.batch or (self.batch_per_worker or 0) * num_workers or self.optimizer.base_batch
        return self.model_copy(update={"batch": batch, "batch_per_worker": None})

    @property
    def global_batch(self) -> int:
        """Samples of one update over all workers, once `resolved` has settled them."""
        if self.batch is None:
            raise ValueError("the batch depends on the number of workers: call resolved(num_workers) first")
        return self.batch

    def to_yaml(self) -> str:
        """As a file that `read_config` reads back to an equal value."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def validated(values: Mapping[str, Any]) -> RunConfig:
    """`values` as a RunConfig, or one line that says what is wrong with the first wrong one."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Input should be ")
        what = f"a number {what}" if what.startswith(("greater", "less")) else what
        raise ConfigError(f"config key {key!r}: expected {what}, found {first['input']!r}") from error


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """All keys of a config, those of sections with a dot."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known_keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
