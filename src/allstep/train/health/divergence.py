"""Divergence of the loss: when, with which samples, at which learning rate, and what to try.

`LossWatch` receives the loss of every step and compares it with the best so far:

```
loss |          x x x x x x  Diverged: above the limit for 50 steps
10x  |- - - x - - - - - - -  Spike: the loss recovered; an event, not an end
     |\\   / \\ /
best |_\\_/___x               best: the lowest mean over about the last 10 steps
     +----------------> steps
     nan, inf, or a million times the limit: Diverged at once
```

The limit is 10 times the best, but at least half of the first loss: near the end of a good run the
best is so low that a single mislabelled image costs more than 10 times as much. Above a million
times the limit no model recovers: its loss may fall again, to that of guessing, while the running
statistics of its norms have become infinite. The caller of `LossWatch` checks these before each
evaluation.

`explain` makes a message of the known facts. It lists only remedies for which the facts give a
reason, the most promising first.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.console.escape import escaped
from allstep.optim.scaling_rules import SCALINGS
from allstep.train.config.recipes import BASES
from allstep.train.config.run_config import NEUTRAL, ResolvedConfig

_LIMIT = 10.0
"""The limit of the loss, as a multiple of the best loss so far."""
_OF_THE_FIRST = 0.5
"""The lower bound of the limit, as a fraction of the first loss."""
_MAX_STEPS = 50
"""Steps above the limit after which a run has diverged."""
_HOPELESS = 1e6
"""Multiple of the limit above which a run has diverged at once."""
_SMOOTH = 0.9
"""Factor of the exponential mean of the loss, which covers about 10 steps."""
_MAX_SAMPLES = 8
"""Number of samples that a message lists."""
_MAX_PLACES = 3
"""Number of samples up to which a message gives their places."""
_LONG_WARM_UP = 5.0
"""Epochs of a long warm-up, as in Goyal et al. 2017."""
_LARGE_BATCH = 8
"""Multiple of base_batch from which layer-wise learning rates are recommended."""
_LARGE_LR = 4
"""Multiple of the recipe's learning rate from which the recipe's is recommended."""
_LAYERWISE = {
    # The default coefficient of LARS, 0.001, needs learning rates far above those of SGD.
    "sgd": ("optimizer.name=lars", "optimizer.trust_coefficient=0.02"),
    "adamw": ("optimizer.name=lamb",),
}
"""Layer-wise optimizers for the same learning rate, as docs/large-batch.md recommends them."""


@dataclass(frozen=True)
class Spike:
    """The loss was above the limit for some steps and recovered."""

    step: int
    """First step above the limit."""
    steps: int
    """Number of steps above the limit."""
    peak: float
    """Highest loss of these steps."""
    best: float
    """Best loss so far."""

    def __str__(self) -> str:
        long = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"the loss rose to {self.peak:.4g} at step {self.step} (best so far {self.best:.4g})"
            f" and recovered after {long}"
        )


@dataclass(frozen=True)
class Diverged:
    """The loss is not finite or stayed above the limit, or a tensor of the model is not finite."""

    step: int
    loss: float
    best: float | None
    """Best loss so far; None if there was no good step."""
    since: int
    """First step above the limit."""
    broken: str = ""
    """Name of a tensor that is not finite while the loss is finite, else ""."""

    def __str__(self) -> str:
        best = f"; the best so far was {self.best:.4g}" if self.best is not None else ""
        loss = f"{self.loss:.4g}" if math.isfinite(self.loss) else f"{self.loss}"
        if self.broken:
            after = f"after step {self.step}, though the loss is {loss}{best}"
            return f"{self.broken} is not finite {after}"
        reached = f"the loss is {loss} at step {self.step}{best}"
        if not math.isfinite(self.loss):
            return reached
        if self.since == self.step:
            return f"{reached}: no model recovers from that"
        long = f"it has been beyond {_LIMIT:g} times that since step {self.since}"
        return f"{reached}, and {long}"


@dataclass
class LossWatch:
    """Detector of spikes and divergence, which sees the loss of every step.

    All fields are plain numbers for checkpoints: `LossWatch(**asdict(watch))` continues from
    `watch`.
    """

    step: int = 0
    """Number of steps seen."""
    first: float = 0.0
    """Loss of the first step."""
    smooth: float = 0.0
    """Exponentially weighted sum of the losses."""
    weight: float = 0.0
    """Sum of the weights of `smooth`."""
    best: float | None = None
    """Lowest exponential mean so far."""
    since: int = 0
    """First step above the limit; 0 if the last step was not above it."""
    peak: float = 0.0
    """Highest loss since then."""

    def see(self, loss: float, count: int) -> Spike | Diverged | None:
        """Count a step and return a spike that ended, a divergence, or None.

        `loss` is the mean over `count` samples, of all ranks or of this one. A step without samples
        only counts.
        """
        self.step += 1
        if not count:
            return None
        if not math.isfinite(loss):
            return Diverged(self.step, loss, self.best, self.since or self.step)
        if loss > self.limit:
            return self._beyond(loss)
        since, steps, peak = self.since, self.step - self.since, self.peak
        spike = Spike(since, steps, peak, self.best or 0.0) if since else None
        self._keep(loss)
        return spike

    @property
    def limit(self) -> float:
        """Return the limit of the loss; infinity before the first step."""
        if self.best is None:
            return math.inf
        return max(_LIMIT * self.best, _OF_THE_FIRST * self.first)

    def _beyond(self, loss: float) -> Diverged | None:
        """Count a step above the limit; return the divergence if it is one."""
        self.since, self.peak = self.since or self.step, max(self.peak, loss)
        if loss > _HOPELESS * self.limit:
            return Diverged(self.step, loss, self.best, self.step)
        if self.step - self.since < _MAX_STEPS:
            return None
        return Diverged(self.step, loss, self.best, self.since)

    def broken(self, name: str, loss: float) -> Diverged:
        """Return the divergence for a tensor `name` that is not finite after a step of `loss`."""
        return Diverged(self.step, loss, self.best, self.step, name)

    def _keep(self, loss: float) -> None:
        """Count a step below the limit."""
        self.since, self.peak = 0, 0.0
        self.first = self.first if self.weight else loss
        self.smooth = _SMOOTH * self.smooth + (1 - _SMOOTH) * loss
        self.weight = _SMOOTH * self.weight + (1 - _SMOOTH)
        mean = self.smooth / self.weight
        self.best = mean if self.best is None else min(self.best, mean)


@dataclass(frozen=True)
class Suspect:
    """A sample of the step at which a run diverged."""

    rank: int
    number: int
    """Number of the sample in its source."""
    place: str = ""
    """Place where it is stored: a file, or a record of one."""
    is_finite: bool = True
    """Whether the sample was finite as input of the model."""


@dataclass(frozen=True)
class Circumstances:
    """Facts about the step at which a run diverged."""

    samples: int
    """Samples trained on before the step."""
    epoch: float
    lr: float
    """Learning rate of the step."""
    batch: int
    grad_norm: float | None = None
    suspects: Sequence[Suspect] = ()
    """Samples whose loss is known not to be finite, else all samples of the step."""
    checkpoint: Path | None = None
    """Last checkpoint that was written before the divergence."""


def explain(diverged: Diverged, known: Circumstances, config: ResolvedConfig) -> str:
    """Return a message with what happened, the facts and the remedies.

    The first line states what happened; the others are indented below it.
    """
    norm = "" if known.grad_norm is None else f", gradient norm {known.grad_norm:.3g}"
    lines = [
        f"{diverged} ({known.samples:,} samples seen, epoch {known.epoch:.2f}; lr"
        f" {known.lr:.3g}, batch {known.batch}{norm})"
    ]
    if known.suspects:
        lines.append(_samples(known))
    lines.append("what to try, most promising first:")
    lines += [f"  {remedy}" for remedy in remedies(known, config)]
    lines.append(_kept(known.checkpoint))
    # File names in the lines may contain line breaks, which are escaped.
    return "\n  ".join(map(escaped, lines))


def remedies(known: Circumstances, config: ResolvedConfig) -> list[str]:
    """Return what may help, the most promising first, each as "key=value: reason"."""
    return [
        *_by_input(known),
        *_by_precision(config),
        *_by_lr(known, config),
        *_by_gradients(known, config),
    ]


def _by_input(known: Circumstances) -> Iterator[str]:
    """Yield the advice for samples that are not finite."""
    bad = [suspect for suspect in known.suspects if not suspect.is_finite]
    if bad:
        numbers = ", ".join(str(suspect.number) for suspect in bad[:_MAX_SAMPLES])
        yield (
            f"inspect the samples {numbers}: as input of the model they are not finite, so the data"
            " or data.mean, data.std are wrong"
        )


def _by_precision(config: ResolvedConfig) -> Iterator[str]:
    """Yield the advice for float16."""
    if config.precision == "float16":
        yield "precision=bfloat16: float16 ends at 65504, bfloat16 has the range of float32"


def _by_lr(known: Circumstances, config: ResolvedConfig) -> Iterator[str]:
    """Yield the advice for a high learning rate."""
    optimizer = config.optimizer
    own = BASES[config.recipe]().optimizer if config.recipe in BASES else optimizer
    is_comparable = (own.name, own.base_batch) == (optimizer.name, optimizer.base_batch)
    if is_comparable and optimizer.lr > _LARGE_LR * own.lr:
        whose = "the default" if config.recipe == NEUTRAL else "the recipe's own lr"
        yield (
            f"optimizer.lr={own.lr:g}: {whose}; {optimizer.lr:g} is {optimizer.lr / own.lr:.3g}"
            " times that"
        )
    yield from _by_warm_up(config)
    if known.batch >= _LARGE_BATCH * optimizer.base_batch:
        yield from _by_batch(known, config)


def _by_warm_up(config: ResolvedConfig) -> Iterator[str]:
    """Yield the advice for a learning rate that is scaled up without a long warm-up."""
    optimizer, schedule, longer = config.optimizer, config.schedule, _longer(config)
    scaled = SCALINGS[optimizer.scaling](1.0, config.batch, optimizer.base_batch)
    keys = ["schedule.warmup_kind=gradual"] if schedule.warmup_kind == "none" else []
    keys += [f"schedule.warmup={longer:g}"] if config.warmup_epochs < longer else []
    # The one-cycle schedule rises by itself and has no warm-up.
    if scaled > 1 and keys and schedule.shape != "one-cycle":
        to = f"{scaled:.3g} times that of base_batch {optimizer.base_batch}"
        within = f"rises to {to} within {config.warmup:g} epochs"
        rises = within if config.warmup else f"is {to}, from the first step on"
        yield f"{' '.join(keys)}: the learning rate {rises}"


def _longer(config: ResolvedConfig) -> float:
    """Return the epochs of a long warm-up for a run of this length.

    It must end before the learning rate falls.
    """
    before = config.milestones[0] / 2 if config.schedule.shape == "step" else config.num_epochs
    return min(_LONG_WARM_UP, max(config.num_epochs / 4, config.warmup_epochs), before)


def _by_batch(known: Circumstances, config: ResolvedConfig) -> Iterator[str]:
    """Yield the advice for a batch far above base_batch."""
    optimizer = config.optimizer
    times = f"{known.batch / optimizer.base_batch:.3g} times"
    far = f"batch {known.batch} is {times} base_batch {optimizer.base_batch}"
    root = ["optimizer.scaling=square-root"] if optimizer.scaling == "linear" else []
    if optimizer.name in _LAYERWISE:
        keys = " ".join([*_LAYERWISE[optimizer.name], *root])
        yield (
            f"{keys}: {far}, where layers need learning rates of their own;"
            f" start with the lr of {optimizer.name}"
        )
    if root:
        yield f"{root[0]}: {far}, where a proportional learning rate is too high"


def _by_gradients(known: Circumstances, config: ResolvedConfig) -> Iterator[str]:
    """Yield the advice for large gradients: clipping, less noise, a lower learning rate."""
    optimizer = config.optimizer
    if optimizer.clip is None:
        yield f"optimizer.clip=1: {_why_clip(known.grad_norm)}"
    if optimizer.noise:
        yield f"optimizer.noise=0: noise of variance {optimizer.noise:g} can be too much"
    yield f"optimizer.lr={optimizer.lr / 2:g}: half of the present value"


def _why_clip(norm: float | None) -> str:
    """Return the reason for gradient clipping."""
    return (
        "it limits the effect of one large gradient"
        if norm is None or norm <= 1
        else f"the gradient's norm was {norm:.3g}"
    )


def _samples(known: Circumstances) -> str:
    """Return a line about the samples of the step, those with bad input first, then by rank.

    Places are given for bad input, and if there are few samples.
    """
    ordered = sorted(known.suspects, key=lambda suspect: (suspect.is_finite, suspect.rank))
    shown, more = ordered[:_MAX_SAMPLES], len(ordered) - _MAX_SAMPLES
    # If a whole batch or many of its samples are suspect, the samples are not the cause.
    few = len(ordered) <= _MAX_PLACES and len(ordered) < known.batch
    listed = [_sample(suspect, with_place=few or not suspect.is_finite) for suspect in shown]
    rest = f" and {more} more" if more > 0 else ""
    return f"samples of that step: {', '.join(listed)}{rest}"


def _sample(suspect: Suspect, with_place: bool) -> str:
    """Return the number of a sample, with place and rank if asked for."""
    place = f" ({suspect.place}) on rank {suspect.rank}" if with_place and suspect.place else ""
    return f"{suspect.number}{place}"


def _kept(checkpoint: Path | None) -> str:
    """Return a line about the last good checkpoint."""
    if checkpoint is None:
        return "no checkpoint was written before the divergence"
    return f"the last good checkpoint is kept: {checkpoint}"
