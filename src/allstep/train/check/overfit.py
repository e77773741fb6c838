"""`allstep train --overfit 64`: check whether the model can memorize 64 samples. It is the first
test of any model.

A model that is large enough to be worth training, with a loss that fits the labels and data that
reaches the model intact, memorizes them in seconds. A model that cannot has a bug, and more data or
time would not help.

```
simplified   the recipe without what prevents memorizing; a line lists what was switched off
learn        up to 200 epochs of the same samples; ends after an epoch in which the task counts
             them as learned (classification: all of them right, and a mean loss below 0.1)
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
from allstep.train.task.tally import Tally
from allstep.train.task.task import Task
from allstep.train.watch.events import Score
from allstep.world import World

EPOCHS = 200
"""Maximum number of epochs."""
_WARMUP = 5.0
"""Epochs of the warm-up; an epoch has one or two steps."""
_REPORT_EVERY = 20
"""Epochs between two progress lines."""


@dataclass(frozen=True)
class Learned:
    """Outcome of trying to memorize some samples."""

    task: Task
    samples: int
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
        """Return whether the task counts the samples as learned."""
        return is_learned(self.task, self.first, self.last)


def is_learned(task: Task, first: Score, last: Score) -> bool:
    """Return whether the score of the last epoch counts as learned, next to that of the first."""
    return last.count > 0 and task.has_learned(last.loss, last.metrics, first.loss)


def _right(task: Task, score: Score) -> str:
    """Return the objective as text, such as "accuracy 98.2%"; "" if training does not show it."""
    figures = task.figures()
    if (name := figures.objective) not in score.metrics:
        return ""
    return f", {figures.label(name)} {figures.text(name, score.of(name))}"


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
    task, first, last = job.trainer.task, Score(0.0, 0), Score(0.0, 0)
    epochs = steps = 0
    for epochs, (updates, last) in enumerate(_epochs(job), 1):
        steps += updates
        first = last if epochs == 1 else first
        if epochs == 1 or epochs % _REPORT_EVERY == 0:
            report(f"epoch {epochs}: loss {last.loss:.4f}{_right(task, last)}")
        if is_learned(task, first, last) or not math.isfinite(last.loss):
            break
    evaluated = _evaluate(job) if is_learned(task, first, last) else None
    return Learned(task, job.num_train, steps, epochs, first, last, evaluated)


def _evaluate(job: Job) -> Score:
    """Return the score of the samples in evaluation mode."""
    loader, trainer = job.loaders["validation"], job.trainer
    return evaluate(job.evaluated_model, loader, trainer.to_input, trainer.task)


def _epochs(job: Job) -> Iterator[tuple[int, Score]]:
    """Train, and yield after each epoch its number of updates and its score over all ranks."""
    loader, clock = job.loaders["train"], Clock()
    steps, total = 0, Tally.of_training(job.trainer.task)
    for batch in loader.batches(0, job.total):
        steps, total = steps + 1, total + _update(job, batch, clock)
        if steps == len(loader):
            yield steps, total.score()
            steps, total = 0, Tally.of_training(job.trainer.task)


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
    task, last, samples = learned.task, learned.last, learned.samples
    if not learned.by_heart:
        so_far = (
            f"the loss is {last.loss:.4g} ({learned.first.loss:.4g} in the first epoch)"
            f"{_right(task, last)}"
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
    if evaluated is not None and not is_learned(task, learned.first, evaluated):
        line += (
            f" (in evaluation mode loss {evaluated.loss:.4g}{_right(task, evaluated)}: running"
            " statistics of norms follow slowly, and images prepared by data.prepare may look"
            " different)"
        )
    return line


def advice(learned: Learned) -> str:
    """Return what the figures point to."""
    first, last = learned.first.loss, learned.last.loss
    guessing = learned.task.loss_of_guessing()
    if not math.isfinite(last) or last > 2 * first:
        return (
            "the learning rate, which is too high (optimizer.lr=... ten times smaller), and the"
            " model for divisions by zero and overflows"
        )
    if last > 0.9 * min(first, first if guessing is None else guessing):
        which = (
            "its first value" if guessing is None else f"that of guessing, which is {guessing:.3g}"
        )
        return (
            "the input of the model (allstep data show) and whether gradients reach its weights"
            f" (requires_grad, detach): the loss has hardly moved from {which}; then the learning"
            " rate (optimizer.lr)"
        )
    if learned.last.metrics.get("accuracy", 0.0) > 0.9:
        return (
            "samples that look alike and have different labels (allstep data show), or train with a"
            " higher learning rate (optimizer.lr)"
        )
    return (
        "the learning rate (optimizer.lr: try three times more and less), then the model, which"
        " may be too small for so many samples"
    )
