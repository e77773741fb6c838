"""The components of a run on one rank, and their place in a world.

```
lasts                          depends on the world: `place`
model, optimizer, EMA          over which ranks gradients are reduced
progress, loss watch, growth   number of micro-batches of a rank
data, loaders' workers         share of each batch (`shares`), batch of an evaluation
precision, execution           rank and size of the step; the sum after it
```

A run starts in a world and resumes in another one, perhaps of another size. In an elastic run the
world changes while the job stays in memory. All three call `place`, so that the same position in
the same world computes the same bits (D15).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from allstep.data import Batch, Loader
from allstep.kvstore.training import SharedModel
from allstep.optim import RunningNoiseScale
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.health.divergence import LossWatch
from allstep.train.input.loaders import list_bad_samples, place_loaders
from allstep.train.input.splits import Splits
from allstep.train.run.progress import RunProgress
from allstep.train.step import build, pushing, sharing
from allstep.train.step.after_step import AfterStep
from allstep.train.step.batch_growth import Growth
from allstep.train.step.ema import Average
from allstep.train.step.running_statistics import RunningStatistics
from allstep.train.step.speed_rule import SpeedRule
from allstep.train.step.step import Trainer
from allstep.world import World


@dataclass
class Job:
    """The components of a run on this rank; `place` adds `after_step`."""

    config: ResolvedConfig
    world: World
    out: Path
    splits: Splits
    loaders: Mapping[str, Loader]
    trainer: Trainer
    progress: RunProgress
    growth: Growth
    watch: LossWatch
    speed_rule: SpeedRule | None = None
    ema: Average | None = None
    noise: RunningNoiseScale | None = None
    shares_weights: bool = False
    is_elastic: bool = False
    """Whether a step may fail and be repeated in another world."""
    shared: SharedModel | None = None
    """The weights to which the parties push, in an asynchronous mode of `sync`."""
    execution: str = "plain"
    notes: list[str] = field(default_factory=list)
    after_step: AfterStep = field(init=False)

    @property
    def total(self) -> int:
        """Samples of the whole run."""
        return self.config.num_epochs * self.num_train

    @property
    def num_train(self) -> int:
        """Samples of an epoch."""
        return self.loaders["train"].num_samples

    @property
    def evaluated_model(self) -> nn.Module:
        """The model that is evaluated: that of the EMA if there is one, else the trained one."""
        return self.trainer.model if self.ema is None else self.ema.model

    def epoch_end(self, position: int) -> int:
        """Return the position at which the epoch of `position` ends."""
        return (position // self.num_train + 1) * self.num_train

    def why_over(self) -> str:
        """Return the reason why there is no further step; "" if there is one."""
        if self.progress.samples >= self.total:
            return "all epochs are done"
        section, best = self.config.evaluation, self.progress.best
        # Asked at every step, of which most have no such rule.
        if section.patience is None and section.stop_at is None:
            return ""
        figures = self.trainer.task.figures()
        name = figures.objective
        if section.patience is not None and self.progress.worse >= section.patience:
            return (
                f"no better validation {name} in {self.progress.worse} evaluations"
                " (evaluation.patience)"
            )
        if section.stop_at is not None and best and figures.reaches(best, section.stop_at):
            value = figures.text(name, best.of(name), 2)
            return f"the validation {name} is {value} (evaluation.stop_at)"
        return ""

    def move_to(self, out: Path) -> None:
        """Write the files of this rank into the run folder `out` from now on."""
        self.out = out
        list_bad_samples(self.loaders, out)

    def empty_batch(self) -> Batch:
        """Return a share without samples at the present position."""
        nothing = torch.zeros((0, *self.splits.shape), dtype=torch.uint8)
        none, position = torch.zeros(0, dtype=torch.int64), self.progress.samples
        return Batch(nothing, none, none.numpy(), 0, position // self.num_train, position, {})

    def set_num_micro_batches(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches in which a worker computes its share."""
        self.trainer.num_micro_batches = num_micro_batches
        self.trainer.optimizer.set_backward_passes_per_step(num_micro_batches)


def place(job: Job, world: World) -> None:
    """Give a job its place in `world`: set everything that depends on rank and size.

    The threads of this process are set by `comm.init`. A step in progress is dropped.
    """
    config, trainer = job.config, job.trainer
    place_loaders(job.loaders, config, job.splits, world)
    trainer.rank, trainer.size = world.rank, world.size
    trainer.shares = job.loaders["train"].shares
    if not config.sync.mode.has_equal_steps:
        # A step is that of a single worker, whichever party computes it.
        trainer.rank, trainer.size, trainer.shares = 0, 1, ()
    job.speed_rule = sharing.make_rule(config, world.size)
    # A single worker estimates the noise scale from a micro-batch, several from their shares.
    trainer.measures_first_micro_batch = sharing.measures_noise(config) and world.size == 1
    if world is not job.world:
        build.attach(trainer.optimizer, world, reduces=config.sync.mode.has_equal_steps)
        job.world = world
    job.set_num_micro_batches(_num_micro_batches(job))
    add_up = None
    if not config.sync.mode.has_equal_steps:
        job.shared = pushing.share_weights(config, trainer.model, trainer.optimizer, job.num_train)
        add_up = pushing.adder(job.shared)
    statistics = RunningStatistics(trainer.model, job.is_elastic, add_up)
    job.after_step = AfterStep(statistics, world, sharing.exchanged(config))


def _num_micro_batches(job: Job) -> int:
    """Return the number of micro-batches for the present batch, which may have grown."""
    base, batch = job.config.accumulation, job.progress.batch
    if batch == job.config.batch:
        return base
    return job.growth.num_micro_batches(batch, job.loaders["train"].shares, base)
