"""Does the model fit: too little (underfitting), too closely (overfitting), or is it too early to
tell?

```
             too short, too few samples, not comparable ──> no verdict, with the reason
compared ──> still improving steeply                    ──> "Still improving: train longer"
             training error high, gap no larger         ──> underfitting: High training error
             training error low, gap large              ──> overfitting: Low training error, high validation error
```

Training and validation error are those of the same weights, in evaluation mode (`compared`). The
gap is validation error minus training error; one that the number of samples can make by chance (two
standard errors) gives no verdict. A verdict needs a run that is long enough: one epoch shows
neither whether the error would fall further nor what repeating the samples does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from allstep.console.quantities import count, figure, percent, plural
from allstep.report.compared import Compared, Measured, compared
from allstep.report.ending import divergence, is_finished
from allstep.report.judgement import Judgement
from allstep.report.series import counts, samples_per_epoch, steps, validations
from allstep.runlog import Fields, RunRecord, number

HIGH_TRAINING_ERROR = 0.10
LEAST_GAP = 0.02
"""Between training and validation error."""
GAP_FACTOR = 1.5
"""Validation error over training error."""
TURNED = 1.10
"""Last validation loss over the lowest."""
IMPROVING, STEEP = 0.05, 0.20
"""Part of the validation loss that the last quarter of the run took away; with the second, a
verdict would be premature."""
LEAST_UPDATES, LEAST_EVALUATIONS = 50, 2
"""Of a run that is long enough for a verdict; it also has a whole epoch."""

_OF = "verdict on over- or underfitting"


# What a verdict rests on


class _Fall(NamedTuple):
    """Of the validation loss, up to the last evaluation, which is among the best."""

    before: float
    after: float
    is_quarter: bool
    """Over the last quarter of the evaluations; else, where they are few, since the one before."""

    @property
    def share(self) -> float:
        return 1 - self.after / self.before


@dataclass(frozen=True)
class Fit:
    """The errors of a run, and how far it had come. None: not known."""

    errors: Compared
    fall: _Fall | None
    epochs: float | None
    updates: int | None
    validations: tuple[Fields, ...]
    is_finished: bool
    has_diverged: bool

    @property
    def underfits(self) -> bool:
        """Many training samples are wrong, and validation adds no more than that again."""
        found = self.errors
        if found.train is None or found.train.error < HIGH_TRAINING_ERROR:
            return False
        return found.gap is None or found.gap <= found.train.error

    @property
    def overfits(self) -> bool:
        """Validation is worse by some points, and by half as much again."""
        found = self.errors
        if found.train is None or found.gap is None or self.underfits:
            return False
        return (
            found.gap >= LEAST_GAP
            and found.train.error + found.gap >= GAP_FACTOR * found.train.error
        )

    @property
    def is_premature(self) -> bool:
        """Whether the training error is high and falls so fast that a verdict would be about the
        length of the run."""
        train, fall = self.errors.train, self.fall
        is_high = train is not None and train.error >= HIGH_TRAINING_ERROR
        return is_high and fall is not None and fall.share >= STEEP and not _too_short(self)


def look(record: RunRecord) -> Fit:
    """Reads a record once for all rules."""
    lines, found, size = steps(record), validations(record), samples_per_epoch(record)
    return Fit(
        errors=compared(record),
        fall=_fall(_numbers(found, "loss")),
        epochs=lines[-1]["samples"] / size if lines and size else None,
        updates=_num_updates(lines),
        validations=tuple(found),
        is_finished=is_finished(record),
        has_diverged=divergence(record) is not None,
    )


def _fall(losses: Sequence[float]) -> _Fall | None:
    if len(losses) < 2 or min(losses) not in losses[-2:]:
        return None
    is_quarter = len(losses) >= 4
    before = losses[len(losses) * 3 // 4 - 1] if is_quarter else losses[-2]
    return _Fall(before, losses[-1], is_quarter) if before > 0 else None


def _num_updates(lines: Sequence[Fields]) -> int | None:
    """By the samples and the batch of each line; None where a line has no batch."""
    batches = [number(line, "batch") or 0.0 for line in lines]
    if not lines or min(batches) <= 0:
        return None
    return sum(math.ceil(size / batch) for size, batch in zip(counts(lines), batches, strict=True))


# The rules


def high_training_error(fit: Fit) -> Judgement | None:
    """Most of the error is there in training already."""
    found = fit.errors
    if found.train is None or not fit.underfits or _withheld(fit) is not None:
        return None
    is_improving = (
        fit.fall is not None
        and fit.fall.is_quarter
        and fit.fall.share >= IMPROVING
        and fit.is_finished
    )
    advice = (
        "It has not learnt the training set yet, and it still improves: train longer first, then"
        " try a bigger model."
        if is_improving
        else (
            "It cannot even fit what it trains on: a bigger model, longer training, a better rate,"
            " less regularisation."
        )
    )
    beside = "" if found.gap is None else f", validation {_signed(found.gap)} points from it"
    figures = f"training error {percent(found.train.error)}{_where(found)}{beside}"
    return Judgement("high_training_error", "problem", "High training error", figures, advice)


def overfitting(fit: Fit) -> Judgement | None:
    """Low training but high validation error."""
    found = fit.errors
    if (
        not fit.overfits
        or found.validation is None
        or found.gap is None
        or _withheld(fit) is not None
    ):
        return None
    figures = f"{_in_words(found)}: {_signed(found.gap)} points"
    advice = (
        "In this order: more data, augmentation, dropout, weight decay, early stopping; or a"
        " smaller model."
    )
    title = "Low training error, high validation error"
    severity: Literal["problem", "hint"] = (
        "problem" if found.validation.error > HIGH_TRAINING_ERROR else "hint"
    )
    return Judgement("overfitting", severity, title, figures, advice)


def no_verdict(fit: Fit) -> Judgement | None:
    """A run that has ended, of which it cannot be known whether the model fits."""
    # Without an end, that is the reason, and `unfinished` gives it; a premature verdict is the
    # matter of `still_improving`.
    return _withheld(fit) if fit.is_finished and not fit.is_premature else None


def still_improving(fit: Fit) -> Judgement | None:
    """The validation loss was still falling when the run ended."""
    fall = fit.fall
    if (
        fall is None
        or not fit.is_finished
        or fall.share < (IMPROVING if fall.is_quarter else STEEP)
    ):
        return None
    since = "in the last quarter" if fall.is_quarter else "since the evaluation before"
    figures = (
        f"validation loss fell from {figure(fall.before)} to {figure(fall.after)}"
        f" ({percent(fall.share, 0)}) {since}"
    )
    if fit.is_premature:
        figures += f", too steeply for a {_OF}; so far {_in_words(fit.errors)}"
        return Judgement("still_improving", "hint", "Still improving: train longer", figures)
    return Judgement(
        "still_improving",
        "hint",
        "Still improving at the end",
        figures,
        "More epochs should give more.",
    )


def validation_turned(fit: Fit) -> Judgement | None:
    """The validation loss was lower before."""
    losses = _numbers(fit.validations, "loss")
    if len(losses) < 4:
        return None
    best = min(range(len(losses)), key=losses.__getitem__)
    if best >= len(losses) * 3 // 4 or losses[-1] < TURNED * losses[best]:
        return None
    figures = (
        f"validation loss was lowest, {figure(losses[best])}, at evaluation {best + 1} of"
        f" {len(losses)} and is {figure(losses[-1])} now"
    )
    advice = (
        "Stop earlier, or keep the best weights; the remedies for a high validation error apply."
    )
    severity: Literal["problem", "hint"] = "problem" if _accuracy_fell(fit.validations) else "hint"
    return Judgement("validation_turned", severity, "Validation got worse again", figures, advice)


RULES: tuple[Callable[[Fit], Judgement | None], ...] = (
    high_training_error,
    overfitting,
    no_verdict,
    validation_turned,
    still_improving,
)


# When there is none


def _withheld(fit: Fit) -> Judgement | None:
    """Why nothing is said about over- and underfitting; None when it can be judged, or when there
    is no error to judge by."""
    found = fit.errors
    if found.train is None:
        return None
    errors = _in_words(found)
    if reason := _too_short(fit):
        return _none(f"Too short for a {_OF}", f"{reason}; {errors}", "Train longer for one.")
    if fit.is_premature or fit.has_diverged:
        return _none(f"Too early for a {_OF}", errors)
    if reason := _too_few(fit):
        advice = "A larger validation split would show it: `data.validation=N`."
        return _none(f"Too few samples for a {_OF}", f"{errors}; {reason}", advice)
    if fit.underfits and found.obstacles:
        figures = (
            f"{errors}; training steps had {_listed(found.obstacles)}, which makes their error"
            " higher"
        )
        advice = "`allstep eval RUN --part train` measures the training error in evaluation mode."
        return _none("No verdict on underfitting", figures, advice)
    return None


def _none(title: str, figures: str, advice: str = "") -> Judgement:
    return Judgement("no_verdict", "hint", title, figures, advice)


def _too_short(fit: Fit) -> str:
    """The reason, in figures; empty when the run is long enough."""
    if fit.epochs is not None and fit.epochs < 1:
        return f"{figure(fit.epochs)} of an epoch"
    if fit.updates is not None and fit.updates < LEAST_UPDATES:
        return (
            f"{plural(fit.updates, 'update')} of the weights, of which a verdict needs"
            f" {LEAST_UPDATES}"
        )
    is_short = fit.epochs is None or fit.epochs < 2
    if len(fit.validations) < LEAST_EVALUATIONS and (is_short or fit.underfits):
        epochs = "" if fit.epochs is None else f"{plural(math.floor(fit.epochs), 'epoch')} with "
        return (
            f"{epochs}{plural(len(fit.validations), 'evaluation')}, which does not show whether it"
            " still improves"
        )
    return ""


def _too_few(fit: Fit) -> str:
    """The reason, in figures, where chance alone could make the error, or the gap, that a verdict
    would rest on."""
    train, validation, gap = fit.errors.train, fit.errors.validation, fit.errors.gap
    if train is None or validation is None or gap is None:
        return ""
    if fit.underfits and train.error - train.noise < HIGH_TRAINING_ERROR / 2:
        return (
            f"with {_samples(train)} the training error is known to ±{100 * train.noise:.1f} points"
        )
    if fit.overfits and gap < fit.errors.noise:
        few = min(train, validation, key=lambda each: each.count or 0.0)
        return f"with {_samples(few)} chance makes a gap of ±{100 * fit.errors.noise:.1f} points"
    return ""


# Figures


def _accuracy_fell(found: Sequence[Fields]) -> bool:
    """Below its best by more than the size of the validation split can make."""
    accuracies = _numbers(found, "accuracy")
    if not accuracies:
        return False
    return (
        max(accuracies) - accuracies[-1]
        > Measured(1 - accuracies[-1], number(found[-1], "count")).noise
    )


def _numbers(lines: Sequence[Fields], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def _in_words(found: Compared) -> str:
    pairs = (("training", found.train), ("validation", found.validation))
    return ", ".join(
        f"{name} error {percent(each.error)}" for name, each in pairs if each is not None
    )


def _where(found: Compared) -> str:
    """Where the training error comes from."""
    if not found.is_evaluated or found.train is None:
        return " in the last tenth of an epoch of training steps"
    return f" of {_samples(found.train)} in evaluation mode"


def _samples(measured: Measured) -> str:
    return f"{count(measured.count or 0)} samples"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _signed(gap: float) -> str:
    return f"{100 * gap:+.1f}"
