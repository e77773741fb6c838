"""`allstep train --overfit 64`: check whether the model can memorize 64 samples. It is the first
test of any model.

A model that is large enough to be worth training, with a loss that fits the labels and data that
reaches the model intact, memorizes them in seconds. A model that cannot has a bug, and more data or
time would not help.

```
simplified   the recipe without what prevents memorizing; a line lists what was switched off
learn        up to 200 epochs of the same samples; ends after an epoch with all of them right and
             a mean loss below 0.1
verdict      one line with the figures, and what to check if it failed
```

It leaves no files: no run folder, no checkpoint.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.train.check.verify import switch_dropout_off
from allstep.train.config.check_sync import synchronous
from allstep.train.config.run_config import EmaConfig, GrowthConfig, ResolvedConfig, ScheduleConfig
from allstep.train.run.placed_job import Job
from allstep.train.run.setup import make_job
from allstep.train.score.evaluate import evaluate
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import Clock, step
from allstep.train.task.task import Tally
from allstep.train.watch.events import Score
from allstep.world import World

EPOCHS = 200
"""Maximum number of epochs."""
ENOUGH = 0.1
"""Mean loss of an epoch below which samples count as learned: the right class has 90% then."""
_WARMUP = 5.0
"""Epochs of the warm-up; an epoch has one or two steps."""
_REPORT_EVERY = 20
"""Epochs between two progress lines."""


@dataclass(frozen=True)
class Learned:
    """Outcome of trying to memorize some samples."""

    samples: int
    classes: int
    steps: int
    epochs: int
    first: Score
    """Score of the first epoch."""
    last: Score
    """Score of the last epoch."""
    evaluated: Score | None = None
    """Score of the same samples in evaluation mode, if they were learned."""

    @property
    def by_heart(self) -> bool:
        """Return whether all samples are right, with confidence."""
        return is_learned(self.last)


def is_learned(score: Score) -> bool:
    """Return whether a score counts as learned: all samples right, mean loss below `ENOUGH`."""
    return score.count > 0 and score.accuracy == 1.0 and score.loss < ENOUGH


def simplified(config: ResolvedConfig, count: int) -> tuple[ResolvedConfig, list[str]]:
    """Return the config for `count` samples without what prevents memorizing.

    The second value lists what was switched off, as "key=value".
    """
    off = [f"{key}={value}" for key, value, usual in _in_the_way(config) if value != usual]
    no_decay = {"weight_decay": 0.0, "noise": 0.0, "noise_like": None}
    plain = {} if _resizes(config) else {"augment": "none", "mix": "none"}
    changed = {
        "overfit": count,
        "epochs": EPOCHS,
        "batch": min(config.batch, count),
        "accumulation": min(config.accumulation, config.batch, count),
        "label_smoothing": 0.0,
        "noise_scale": False,
        "execution": "channels-last" if config.execution == "auto" else config.execution,
        "data": config.data.model_copy(update=plain),
        "optimizer": config.optimizer.model_copy(update=no_decay),
        "schedule": ScheduleConfig(shape="constant", warmup=_WARMUP),
        "ema": EmaConfig(),
        "growth": GrowthConfig(),
    }
    return config.model_copy(update=changed), off


def _resizes(config: ResolvedConfig) -> bool:
    """Return whether the augmentation decides the size of the images.

    Then it is kept for the shape of the model; the loader does not apply it with `overfit`.
    """
    return config.data.augment != "none" and config.data.prepare != "none"


def _in_the_way(config: ResolvedConfig) -> Iterator[tuple[str, object, object]]:
    """Yield keys that prevent memorizing, with their value and their neutral value."""
    yield "data.augment", config.data.augment, "none"
    yield "data.mix", config.data.mix, "none"
    yield "label_smoothing", config.label_smoothing, 0.0
    yield "optimizer.weight_decay", config.optimizer.weight_decay, 0.0
    yield "optimizer.noise", config.optimizer.noise, 0.0
    yield "optimizer.noise_like", config.optimizer.noise_like, None
    yield "ema.decay", config.ema.decay, None
    yield "growth.at", config.growth.at, ()
    yield "growth.by_noise", config.growth.by_noise, False


def learn(
    config: ResolvedConfig,
    world: World,
    out: Path,
    report: Callable[[str], None] = lambda line: None,
) -> Learned:
    """Train with a `simplified` config until the samples are learned, on all ranks.

    `out` is the folder for lists of bad samples. `report` receives a line of progress now and then.
    """
    job = make_job(synchronous(config), world, out)
    dropouts = switch_dropout_off(job.trainer.model)
    if dropouts:
        report(f"switched off: dropout in {dropouts} layer{'s' if dropouts > 1 else ''}")
    first = last = Score(0.0, 0.0, 0, 0.0)
    epochs = steps = 0
    for epochs, (updates, last) in enumerate(_epochs(job), 1):
        steps += updates
        first = last if epochs == 1 else first
        if epochs == 1 or epochs % _REPORT_EVERY == 0:
            report(f"epoch {epochs}: loss {last.loss:.4f}, {last.accuracy:.1%} right")
        if is_learned(last) or not math.isfinite(last.loss):
            break
    evaluated = _evaluate(job) if is_learned(last) else None
    return Learned(job.num_train, job.splits.num_classes, steps, epochs, first, last, evaluated)


def _evaluate(job: Job) -> Score:
    """Return the score of the samples in evaluation mode."""
    loader, trainer = job.loaders["validation"], job.trainer
    return evaluate(job.evaluated_model, loader, trainer.to_input, trainer.task)


def _epochs(job: Job) -> Iterator[tuple[int, Score]]:
    """Train, and yield after each epoch its number of updates and its score over all ranks."""
    loader, clock = job.loaders["train"], Clock()
    steps, total = 0, job.trainer.task.tally()
    for batch in loader.batches(0, job.total):
        steps, total = steps + 1, total + _update(job, batch, clock)
        if steps == len(loader):
            yield steps, total.score()
            steps, total = 0, job.trainer.task.tally()


def _update(job: Job, batch: Batch, clock: Clock) -> Tally:
    """Take one step and return the tally of all ranks."""
    if batch.epoch == 0:
        agree.everyone(
            job.world, lambda: job.trainer.task.check_targets(batch, job.loaders["train"])
        )
    mine = step(job.trainer, batch, num_samples(job, batch), clock)
    return job.after_step.exchange(StepReport(mine, batch.weight)).tally


def num_samples(job: Job, batch: Batch) -> int:
    """Return the samples of the global batch of which `batch` is a share.

    It has fewer samples at the end of an epoch.
    """
    return min(job.loaders["train"].batch, job.num_train - batch.position % job.num_train)


# Texts


def verdict(learned: Learned) -> str:
    """Return one line about the outcome, with advice if the samples were not learned."""
    last, samples = learned.last, learned.samples
    if not learned.by_heart:
        so_far = (
            f"the loss is {last.loss:.4g} ({learned.first.loss:.4g} in the first epoch),"
            f" {last.accuracy:.1%} are right"
        )
        return (
            f"did not learn {samples} samples by heart in {learned.steps} steps ({learned.epochs}"
            f" epochs): {so_far}. Check {advice(learned)}"
        )
    line = (
        f"learned {samples} samples by heart after {learned.steps} steps: the model, the loss and"
        " the data fit together"
    )
    evaluated = learned.evaluated
    if evaluated is not None and evaluated.accuracy < 1:
        line += (
            f" (in evaluation mode {evaluated.accuracy:.1%} are right: running statistics of norms"
            " follow slowly, and images prepared by data.prepare may look different)"
        )
    return line


def advice(learned: Learned) -> str:
    """Return what the figures point to."""
    first, last, chance = learned.first.loss, learned.last.loss, math.log(max(2, learned.classes))
    if not math.isfinite(last) or last > 2 * first:
        return (
            "the learning rate, which is too high (optimizer.lr=... ten times smaller), and the"
            " model for divisions by zero and overflows"
        )
    if last > 0.9 * min(first, chance):
        return (
            "the input of the model (allstep data show) and whether gradients reach its weights"
            " (requires_grad, detach): the loss has hardly moved from that of guessing, which is"
            f" {chance:.3g}; then the learning rate (optimizer.lr)"
        )
    if learned.last.accuracy > 0.9:
        return (
            "samples that look alike and have different labels (allstep data show), or train with a"
            " higher learning rate (optimizer.lr)"
        )
    return (
        "the learning rate (optimizer.lr: try three times more and less), then the model, which"
        " may be too small for so many samples"
    )
