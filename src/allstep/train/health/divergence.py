"""A loss that has gone wrong, in words: when, with which samples, at which rate, and what to try.

`LossWatch` is told the loss of every step and compares it with the best so far:

```
loss |          x x x x x x  Diverged: above the limit for 50 steps        nan, inf, a million limits   Diverged at once
10x  |- - - x - - - - - - -  Spike: it came back; an event, not an end
     |\\   / \\ /
best |_\\_/___x               best: the lowest mean over about the last 10 steps
     +----------------> steps
```

The limit is 10 times the best, but at least half of the first loss: near the end of a good run the
best is so low that a single mislabelled image is worth more than 10 times of it. From a million
limits no model comes back: its loss may fall again, to that of guessing, while the running statistics
of its norms have become infinite. Those are looked at before each evaluation, by whoever calls
`LossWatch`.

`explain` then makes the message out of what is known. Remedies stand in the order in which they are
likely to help, and only those whose reason is given by the facts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.console.escape import escaped
from allstep.optim.scaling import SCALINGS
from allstep.train.config.recipes import BASES
from allstep.train.config.run_config import NEUTRAL, ResolvedConfig

_BEYOND = 10.0
_OF_THE_FIRST = 0.5
_PATIENCE = 50
_HOPELESS = 1e6  # limits
_SMOOTH = 0.9  # looks back about 10 steps
_MOST_SAMPLES = 8
_MOST_PLACES = 3
_LONG_WARM_UP = 5.0  # epochs, as Goyal et al. 2017 use it
_FAR = 8  # times base_batch
_BOLD = 4  # times the recipe's rate
_LAYERWISE = {
    "sgd": (
        "optimizer.name=lars",
        "optimizer.trust_coefficient=0.02",
    ),  # its own, 0.001, wants rates far above SGD's
    "adamw": ("optimizer.name=lamb",),
}
"""As docs/large-batch.md recommends them for the rate that is there."""


@dataclass(frozen=True)
class Spike:
    """The loss was beyond the limit for a while, and came back."""

    step: int
    """The first beyond it."""
    steps: int
    """How many were."""
    peak: float
    best: float

    def __str__(self) -> str:
        long = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return (
            f"the loss rose to {self.peak:.4g} at step {self.step} (best so far {self.best:.4g})"
            f" and came back after {long}"
        )


@dataclass(frozen=True)
class Diverged:
    """The loss is not a number, or has stayed beyond the limit; or a tensor of the model is not
    finite."""

    step: int
    loss: float
    best: float | None
    """None when there was no good step."""
    since: int
    """The first step beyond the limit."""
    broken: str = ""
    """The tensor that is not finite, where the loss is."""

    def __str__(self) -> str:
        best = f"; the best so far was {self.best:.4g}" if self.best is not None else ""
        if self.broken:
            return (
                f"{self.broken} is not finite after step {self.step}, though the loss is"
                f" {self.loss:.4g}{best}"
            )
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss} at step {self.step}{best}"
        if self.since == self.step:
            return (
                f"the loss is {self.loss:.4g} at step {self.step}{best}: no net comes back from"
                " there"
            )
        long = f"it has been beyond {_BEYOND:g} times that since step {self.since}"
        return f"the loss is {self.loss:.4g} at step {self.step}{best}, and {long}"


@dataclass
class LossWatch:
    """Sees every step.

    Plain numbers, for checkpoints: `LossWatch(**asdict(watch))` goes on where `watch` was.
    """

    step: int = 0
    first: float = 0.0
    smooth: float = 0.0
    weight: float = 0.0
    best: float | None = None
    since: int = 0
    """The first step beyond the limit; 0 when the last one was not."""
    peak: float = 0.0

    def see(self, loss: float, count: int) -> Spike | Diverged | None:
        """The next step: its mean loss over `count` samples, of all ranks or of this one.

        A step without samples says nothing.
        """
        self.step += 1
        if not count:
            return None
        if not math.isfinite(loss):
            return Diverged(self.step, loss, self.best, self.since or self.step)
        if loss > self.limit:
            return self._beyond(loss)
        spike = (
            Spike(self.since, self.step - self.since, self.peak, self.best or 0.0)
            if self.since
            else None
        )
        self._keep(loss)
        return spike

    @property
    def limit(self) -> float:
        """What a loss may be; the first may be anything."""
        return (
            math.inf if self.best is None else max(_BEYOND * self.best, _OF_THE_FIRST * self.first)
        )

    def _beyond(self, loss: float) -> Diverged | None:
        self.since, self.peak = self.since or self.step, max(self.peak, loss)
        if loss > _HOPELESS * self.limit:
            return Diverged(self.step, loss, self.best, self.step)
        if self.step - self.since < _PATIENCE:
            return None
        return Diverged(self.step, loss, self.best, self.since)

    def broken(self, name: str, loss: float) -> Diverged:
        """The tensor of that name was found not to be finite, after a step of that loss."""
        return Diverged(self.step, loss, self.best, self.step, name)

    def _keep(self, loss: float) -> None:
        self.since, self.peak = 0, 0.0
        self.first = self.first if self.weight else loss
        self.smooth = _SMOOTH * self.smooth + (1 - _SMOOTH) * loss
        self.weight = _SMOOTH * self.weight + (1 - _SMOOTH)
        mean = self.smooth / self.weight
        self.best = mean if self.best is None else min(self.best, mean)


@dataclass(frozen=True)
class Suspect:
    """A sample of the step at which it went wrong."""

    rank: int
    number: int
    place: str = ""
    """Where it lies: a file, or a record of one."""
    is_finite: bool = True
    """Whether its input was, as it came to the model."""


@dataclass(frozen=True)
class Circumstances:
    """What is known of the step."""

    samples: int
    """Seen before it."""
    epoch: float
    rate: float
    batch: int
    grad_norm: float | None = None
    suspects: Sequence[Suspect] = ()
    """Samples whose loss was not finite where that is known, else those of the step."""
    checkpoint: Path | None = None
    """The last one that was written while all was well."""


def explain(diverged: Diverged, known: Circumstances, config: ResolvedConfig) -> str:
    """All that helps, a line each; the first says what happened, the others are indented below it."""
    norm = "" if known.grad_norm is None else f", gradient norm {known.grad_norm:.3g}"
    lines = [
        f"{diverged} ({known.samples:,} samples seen, epoch {known.epoch:.2f}; rate"
        f" {known.rate:.3g}, batch {known.batch}{norm})"
    ]
    if known.suspects:
        lines.append(_samples(known))
    lines.append("what to try, the likeliest first:")
    lines += [f"  {remedy}" for remedy in remedies(known, config)]
    lines.append(_kept(known.checkpoint))
    # Names of files are among them; only our own line breaks stay.
    return "\n  ".join(map(escaped, lines))


def remedies(known: Circumstances, config: ResolvedConfig) -> list[str]:
    """What may help, the likeliest first: a config key with its value, and why."""
    return [
        *_by_input(known),
        *_by_precision(config),
        *_by_rate(known, config),
        *_by_gradients(known, config),
    ]


def _by_input(known: Circumstances) -> Iterator[str]:
    bad = [suspect for suspect in known.suspects if not suspect.is_finite]
    if bad:
        numbers = ", ".join(str(suspect.number) for suspect in bad[:_MOST_SAMPLES])
        yield (
            f"look at the samples {numbers}: as input of the net they are not finite, so the data"
            " or data.mean, data.std are wrong"
        )


def _by_precision(config: ResolvedConfig) -> Iterator[str]:
    if config.precision == "float16":
        yield "precision=bfloat16: float16 ends at 65504, bfloat16 has the range of float32"


def _by_rate(known: Circumstances, config: ResolvedConfig) -> Iterator[str]:
    optimizer, schedule = config.optimizer, config.schedule
    scaled = SCALINGS[optimizer.scaling](1.0, config.batch, optimizer.base_batch)
    to = f"{scaled:.3g} times that of base_batch {optimizer.base_batch}"
    own = BASES[config.recipe]().optimizer if config.recipe in BASES else optimizer
    if (own.name, own.base_batch) == (
        optimizer.name,
        optimizer.base_batch,
    ) and optimizer.lr > _BOLD * own.lr:
        whose = "the default" if config.recipe == NEUTRAL else "the recipe's own rate"
        yield (
            f"optimizer.lr={own.lr:g}: {whose}; {optimizer.lr:g} is {optimizer.lr / own.lr:.3g}"
            " times that"
        )
    longer = _longer(config)
    words = ["schedule.warmup_kind=gradual"] if schedule.warmup_kind == "none" else []
    words += [f"schedule.warmup={longer:g}"] if config.warmup_epochs < longer else []
    if (
        scaled > 1 and words and schedule.shape != "one-cycle"
    ):  # which rises by itself, and takes no warm-up
        rises = (
            f"rises to {to} within {config.warmup:g} epochs"
            if config.warmup
            else f"is {to}, from the first step on"
        )
        yield f"{' '.join(words)}: the rate {rises}"
    if known.batch >= _FAR * optimizer.base_batch:
        yield from _by_batch(known, config)


def _longer(config: ResolvedConfig) -> float:
    """Epochs of a warm-up that is long, for a run of that length; it must be over before the rate
    falls."""
    before = config.milestones[0] / 2 if config.schedule.shape == "step" else config.num_epochs
    return min(_LONG_WARM_UP, max(config.num_epochs / 4, config.warmup_epochs), before)


def _by_batch(known: Circumstances, config: ResolvedConfig) -> Iterator[str]:
    optimizer = config.optimizer
    far = (
        f"batch {known.batch} is {known.batch / optimizer.base_batch:.3g} times base_batch"
        f" {optimizer.base_batch}"
    )
    if optimizer.name in _LAYERWISE:
        words = [
            *_LAYERWISE[optimizer.name],
            *["optimizer.scaling=square-root"] * (optimizer.scaling == "linear"),
        ]
        yield (
            f"{' '.join(words)}: {far}, where layers want rates of their own; begin with the rate"
            f" of {optimizer.name}"
        )
    if optimizer.scaling == "linear":
        yield f"optimizer.scaling=square-root: {far}, where a rate in proportion is too high"


def _by_gradients(known: Circumstances, config: ResolvedConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.clip is None:
        yield f"optimizer.clip=1: {_why_clip(known.grad_norm)}"
    if optimizer.noise:
        yield f"optimizer.noise=0: noise of variance {optimizer.noise:g} can be too much"
    yield f"optimizer.lr={optimizer.lr / 2:g}: half of what it is"


def _why_clip(norm: float | None) -> str:
    return (
        "one large gradient cannot do much then"
        if norm is None or norm <= 1
        else f"the gradient's norm was {norm:.3g}"
    )


def _samples(known: Circumstances) -> str:
    """Which they were, those with bad input first, by rank; and where those lie that one might want
    to look at."""
    ordered = sorted(known.suspects, key=lambda suspect: (suspect.is_finite, suspect.rank))
    shown, more = ordered[:_MOST_SAMPLES], len(ordered) - _MOST_SAMPLES
    few = (
        len(ordered) <= _MOST_PLACES and len(ordered) < known.batch
    )  # a whole batch, or many of it: it is not the samples
    words = [_sample(suspect, with_place=few or not suspect.is_finite) for suspect in shown]
    rest = f" and {more} more" if more > 0 else ""
    return f"samples of that step: {', '.join(words)}{rest}"


def _sample(suspect: Suspect, with_place: bool) -> str:
    place = f" ({suspect.place}) on rank {suspect.rank}" if with_place and suspect.place else ""
    return f"{suspect.number}{place}"


def _kept(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "no checkpoint was written while all was well"
    return f"the last good checkpoint is kept: {checkpoint}"
