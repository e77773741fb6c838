"""`allstep train --overfit 64`: can this model learn 64 samples by heart? The first test of any
model.

A model that is large enough to be worth training, a loss that fits the labels and data that reaches
the model unharmed can do it in seconds. One that cannot has a mistake in it, and no amount of data or
time would help.

```
simplified   the recipe without what stands in the way of learning by heart; a line says what was switched off
learn        up to 200 epochs of the same samples; over as soon as one epoch has all of them right and a mean loss below 0.1
verdict      one line, with the figures; what to look at when it did not work
```

It leaves nothing behind: no run folder, no checkpoint.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.train.check.verify import switch_dropout_off
from allstep.train.config.run_config import EmaConfig, GrowthConfig, ResolvedConfig, ScheduleConfig
from allstep.train.run.setup import Job, make_job
from allstep.train.score.evaluate import evaluate
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import Clock, step
from allstep.train.task.task import Tally
from allstep.train.watch.events import Score
from allstep.world import World

EPOCHS = 200
ENOUGH = 0.1
"""The mean loss of an epoch below which samples count as learned: the right class has 90% then."""
_WARMUP = 5.0  # epochs: a step or two each
_TELL_EVERY = 20  # epochs


@dataclass(frozen=True)
class Learned:
    """How it went."""

    samples: int
    classes: int
    steps: int
    epochs: int
    first: Score
    """In the first epoch."""
    last: Score
    evaluated: Score | None = None
    """On the same samples in evaluation mode, if they were learned."""

    @property
    def by_heart(self) -> bool:
        """Whether all samples were right, with confidence."""
        return is_learned(self.last)


def is_learned(score: Score) -> bool:
    """The rule."""
    return score.count > 0 and score.accuracy == 1.0 and score.loss < ENOUGH


def simplified(config: ResolvedConfig, count: int) -> tuple[ResolvedConfig, list[str]]:
    """The run on `count` samples, without what keeps a model from learning by heart; and the words
    for what was switched off."""
    off = [f"{key}={value}" for key, value, usual in _in_the_way(config) if value != usual]
    optimizer = config.optimizer.model_copy(
        update={"weight_decay": 0.0, "noise": 0.0, "noise_like": None}
    )
    data = (
        config.data.model_copy(update={"augment": "none", "mix": "none"})
        if not _resizes(config)
        else config.data
    )
    changed = {
        "overfit": count,
        "epochs": EPOCHS,
        "batch": min(config.batch, count),
        "accumulation": min(config.accumulation, config.batch, count),
        "label_smoothing": 0.0,
        "noise_scale": False,
        "execution": "channels-last" if config.execution == "auto" else config.execution,
        "data": data,
        "optimizer": optimizer,
        "schedule": ScheduleConfig(shape="constant", warmup=_WARMUP),
        "ema": EmaConfig(),
        "growth": GrowthConfig(),
    }
    return config.model_copy(update=changed), off


def _resizes(config: ResolvedConfig) -> bool:
    """Whether the model is made for the size that the augmentation gives; the loader leaves the rest
    of it out with `overfit`."""
    return config.data.augment != "none" and config.data.prepare != "none"


def _in_the_way(config: ResolvedConfig) -> Iterator[tuple[str, object, object]]:
    """Keys with what they are and what they are when they do nothing."""
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
    config: ResolvedConfig, world: World, out: Path, tell: Callable[[str], None] = lambda line: None
) -> Learned:
    """On all ranks, with a config that is `simplified`.

    `out` is where bad samples are listed; `tell` gets a line now and then.
    """
    job = make_job(config, world, out)
    dropouts = switch_dropout_off(job.trainer.model)
    if dropouts:
        tell(f"switched off: dropout in {dropouts} layer{'s' if dropouts > 1 else ''}")
    first = last = Score(0.0, 0.0, 0, 0.0)
    epochs = steps = 0
    for epochs, (updates, last) in enumerate(_epochs(job), 1):
        steps += updates
        first = last if epochs == 1 else first
        if epochs == 1 or epochs % _TELL_EVERY == 0:
            tell(f"epoch {epochs}: loss {last.loss:.4f}, {last.accuracy:.1%} right")
        if is_learned(last) or not math.isfinite(last.loss):
            break
    evaluated = (
        evaluate(
            job.evaluated_model, job.loaders["validation"], job.trainer.to_input, job.trainer.task
        )
        if is_learned(last)
        else None
    )
    return Learned(job.num_train, job.splits.num_classes, steps, epochs, first, last, evaluated)


def _epochs(job: Job) -> Iterator[tuple[int, Score]]:
    """Trains; after each epoch how many updates it had, and its score over all ranks."""
    loader, clock = job.loaders["train"], Clock()
    steps, total = 0, job.trainer.task.tally()
    for batch in loader.batches(0, job.total):
        steps, total = steps + 1, total + _update(job, batch, clock)
        if steps == len(loader):
            yield steps, total.score()
            steps, total = 0, job.trainer.task.tally()


def _update(job: Job, batch: Batch, clock: Clock) -> Tally:
    """One step; the tally of all ranks."""
    if batch.epoch == 0:
        agree.everyone(
            job.world, lambda: job.trainer.task.check_targets(batch, job.loaders["train"])
        )
    mine = step(job.trainer, batch, num_samples(job, batch), clock)
    return job.after_step.exchange(StepReport(mine, batch.weight)).tally


def num_samples(job: Job, batch: Batch) -> int:
    """Of the global batch of which `batch` is a share: fewer where an epoch ends."""
    return min(job.loaders["train"].batch, job.num_train - batch.position % job.num_train)


# Words


def verdict(learned: Learned) -> str:
    """One line."""
    last, samples = learned.last, learned.samples
    if not learned.by_heart:
        so_far = (
            f"the loss is {last.loss:.4g} ({learned.first.loss:.4g} in the first epoch),"
            f" {last.accuracy:.1%} are right"
        )
        return (
            f"did not learn {samples} samples by heart in {learned.steps} steps ({learned.epochs}"
            f" epochs): {so_far}. Look at {advice(learned)}"
        )
    line = (
        f"learned {samples} samples by heart after {learned.steps} steps: the net, the loss and the"
        " data fit together"
    )
    evaluated = learned.evaluated
    if evaluated is not None and evaluated.accuracy < 1:
        line += (
            f" (in evaluation mode {evaluated.accuracy:.1%} are right: running statistics of norms"
            " follow slowly, and images made ready by data.prepare may look different)"
        )
    return line


def advice(learned: Learned) -> str:
    """What the figures point to."""
    first, last, chance = learned.first.loss, learned.last.loss, math.log(max(2, learned.classes))
    if not math.isfinite(last) or last > 2 * first:
        return (
            "the rate, which is too high (optimizer.lr=... ten times smaller), and at the net for"
            " what divides by zero or overflows"
        )
    if last > 0.9 * min(first, chance):
        return (
            "what the net sees (allstep data show) and whether gradients reach its weights"
            " (requires_grad, detach): the loss has hardly moved from that of guessing, which is"
            f" {chance:.3g}; then at the rate (optimizer.lr)"
        )
    if learned.last.accuracy > 0.9:
        return (
            "samples that look alike and have different labels (allstep data show), or train with a"
            " higher rate (optimizer.lr)"
        )
    return (
        "the rate (optimizer.lr: try three times more and less), then at the net, which may be too"
        " small for so many samples"
    )
