"""Rules about underfitting and overfitting, and about when a verdict is not possible.

```
             too short, too few samples, not comparable ──> no verdict, with the reason
compared ──> still improving steeply            ──> "Still improving: train longer"
             training error high, gap no larger ──> underfitting: "High training error"
             training error low, gap large      ──> overfitting: "Low training error, high
                                                    validation error"
```

Training and validation error are those of the same weights, in evaluation mode (`compared`). The
gap is validation error minus training error; a gap that chance explains (below two standard errors
for the number of samples) gives no verdict. A verdict needs a run that is long enough: one epoch
shows neither whether the error would fall further nor the effect of repeated samples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from allstep.console.quantities import count, figure, percent, plural
from allstep.report.compared import Compared, Measured, compared
from allstep.report.ending import divergence, is_finished
from allstep.report.judgement import Judgement
from allstep.runlog import Fields, RunRecord, number
from allstep.study.recorded.series import counts, samples_per_epoch, steps, validations

HIGH_TRAINING_ERROR = 0.10
"""Training error from which a model underfits."""
LEAST_GAP = 0.02
"""Minimum of validation error minus training error for overfitting."""
GAP_FACTOR = 1.5
"""Minimum of validation error divided by training error for overfitting."""
TURNED = 1.10
"""Minimum of the last validation loss divided by the lowest for "got worse again"."""
IMPROVING, STEEP = 0.05, 0.20
"""Fraction by which the validation loss fell in the last quarter of the run.

From the first value the run is still improving, from the second a verdict would be premature.
"""
LEAST_UPDATES, LEAST_EVALUATIONS = 50, 2
"""Minimum updates and evaluations of a run for a verdict, in addition to a whole epoch."""

_OF = "verdict on over- or underfitting"


# The data of a verdict


class _Fall(NamedTuple):
    """Fall of the validation loss up to the last evaluation; one of the last two is the best."""

    before: float
    after: float
    is_quarter: bool
    """Whether it is over the last quarter of the evaluations instead of since the previous one."""

    @property
    def share(self) -> float:
        """Fraction of the loss before."""
        return 1 - self.after / self.before


@dataclass(frozen=True)
class Fit:
    """The errors of a run and its length; None if unknown."""

    errors: Compared
    fall: _Fall | None
    epochs: float | None
    updates: int | None
    validations: tuple[Fields, ...]
    is_finished: bool
    has_diverged: bool

    @property
    def underfits(self) -> bool:
        """Whether the training error is high, and the gap is not larger than it."""
        found = self.errors
        if found.train is None or found.train.error < HIGH_TRAINING_ERROR:
            return False
        return found.gap is None or found.gap <= found.train.error

    @property
    def overfits(self) -> bool:
        """Whether the validation error exceeds the training error by both limits of the gap."""
        found = self.errors
        if found.train is None or found.gap is None or self.underfits:
            return False
        return (
            found.gap >= LEAST_GAP
            and found.train.error + found.gap >= GAP_FACTOR * found.train.error
        )

    @property
    def is_premature(self) -> bool:
        """Whether the training error is high and the validation loss still falls steeply.

        A verdict would then be about the length of the run.
        """
        train, fall = self.errors.train, self.fall
        is_high = train is not None and train.error >= HIGH_TRAINING_ERROR
        return is_high and fall is not None and fall.share >= STEEP and not _too_short(self)


def look(record: RunRecord) -> Fit:
    """Return the data that all rules need from `record`."""
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
    """Return the updates, from samples and batch of each line; None if a line has no batch."""
    batches = [number(line, "batch") or 0.0 for line in lines]
    if not lines or min(batches) <= 0:
        return None
    return sum(math.ceil(size / batch) for size, batch in zip(counts(lines), batches, strict=True))


# The rules


def high_training_error(fit: Fit) -> Judgement | None:
    """Judge a run with underfitting: most of its error is training error."""
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
        "The training error is high and the run still improves: train longer first, then"
        " try a bigger model."
        if is_improving
        else (
            "The model does not fit its training data: try a bigger model, longer training, another"
            " learning rate, less regularization."
        )
    )
    gap = "" if found.gap is None else f", validation {_signed(found.gap)} points from it"
    figures = f"training error {percent(found.train.error)}{_where(found)}{gap}"
    return Judgement("high_training_error", "problem", "High training error", figures, advice)


def overfitting(fit: Fit) -> Judgement | None:
    """Judge a run with low training but high validation error."""
    found = fit.errors
    if (
        not fit.overfits
        or found.validation is None
        or found.gap is None
        or _withheld(fit) is not None
    ):
        return None
    figures = f"{_errors_text(found)}: {_signed(found.gap)} points"
    advice = (
        "Try in this order: more data, augmentation, dropout, weight decay, early stopping; or a"
        " smaller model."
    )
    title = "Low training error, high validation error"
    severity: Literal["problem", "hint"] = (
        "problem" if found.validation.error > HIGH_TRAINING_ERROR else "hint"
    )
    return Judgement("overfitting", severity, title, figures, advice)


def no_verdict(fit: Fit) -> Judgement | None:
    """Judge a finished run for which no verdict is possible, with the reason."""
    # `unfinished` reports a run without an end, `still_improving` one that ended too early.
    return _withheld(fit) if fit.is_finished and not fit.is_premature else None


def still_improving(fit: Fit) -> Judgement | None:
    """Judge a run whose validation loss was still falling when it ended."""
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
        figures += f", too steeply for a {_OF}; so far {_errors_text(fit.errors)}"
        return Judgement("still_improving", "hint", "Still improving: train longer", figures)
    return Judgement(
        "still_improving",
        "hint",
        "Still improving at the end",
        figures,
        "More epochs should improve the score.",
    )


def validation_turned(fit: Fit) -> Judgement | None:
    """Judge a run whose validation loss was lower before its end."""
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
    advice = "Stop earlier, or keep the best weights; see also the advice on overfitting."
    severity: Literal["problem", "hint"] = "problem" if _accuracy_fell(fit.validations) else "hint"
    return Judgement("validation_turned", severity, "Validation got worse again", figures, advice)


RULES: tuple[Callable[[Fit], Judgement | None], ...] = (
    high_training_error,
    overfitting,
    no_verdict,
    validation_turned,
    still_improving,
)


# Reasons for no verdict


def _withheld(fit: Fit) -> Judgement | None:
    """Return why there is no verdict on over- and underfitting.

    None means that a verdict is possible, or that there is no training error to judge by.
    """
    found = fit.errors
    if found.train is None:
        return None
    errors = _errors_text(found)
    if reason := _too_short(fit):
        return _no_verdict(
            f"Too short for a {_OF}", f"{reason}; {errors}", "Train longer to get a verdict."
        )
    if fit.is_premature or fit.has_diverged:
        return _no_verdict(f"Too early for a {_OF}", errors)
    if reason := _too_few(fit):
        advice = "A larger validation split would show it: `data.validation=N`."
        return _no_verdict(f"Too few samples for a {_OF}", f"{errors}; {reason}", advice)
    if fit.underfits and found.obstacles:
        figures = (
            f"{errors}; training steps had {_listed(found.obstacles)}, which makes their error"
            " higher"
        )
        advice = "`allstep eval RUN --part train` measures the training error in evaluation mode."
        return _no_verdict("No verdict on underfitting", figures, advice)
    return None


def _no_verdict(title: str, figures: str, advice: str = "") -> Judgement:
    return Judgement("no_verdict", "hint", title, figures, advice)


def _too_short(fit: Fit) -> str:
    """Return why the run is too short, with figures; "" if it is long enough."""
    if fit.epochs is not None and fit.epochs < 1:
        return f"{figure(fit.epochs)} of an epoch"
    if fit.updates is not None and fit.updates < LEAST_UPDATES:
        return f"{plural(fit.updates, 'update')}, a verdict needs {LEAST_UPDATES}"
    is_short = fit.epochs is None or fit.epochs < 2
    if len(fit.validations) < LEAST_EVALUATIONS and (is_short or fit.underfits):
        epochs = "" if fit.epochs is None else f"{plural(math.floor(fit.epochs), 'epoch')} with "
        return (
            f"{epochs}{plural(len(fit.validations), 'evaluation')}, which does not show whether it"
            " still improves"
        )
    return ""


def _too_few(fit: Fit) -> str:
    """Return why there are too few samples, with figures; "" if there are enough.

    They are too few if chance could explain the error, or the gap, on which a verdict would rest.
    """
    train, validation, gap = fit.errors.train, fit.errors.validation, fit.errors.gap
    if train is None or validation is None or gap is None:
        return ""
    if fit.underfits and train.error - train.noise < HIGH_TRAINING_ERROR / 2:
        return (
            f"with {_samples(train)} the training error is known to ±{100 * train.noise:.1f} points"
        )
    if fit.overfits and gap < fit.errors.noise:
        few = min(train, validation, key=lambda each: each.count or 0.0)
        return f"with {_samples(few)} chance explains a gap of ±{100 * fit.errors.noise:.1f} points"
    return ""


# Figures


def _accuracy_fell(found: Sequence[Fields]) -> bool:
    """Return whether the accuracy fell below its best by more than chance explains."""
    accuracies = _numbers(found, "accuracy")
    if not accuracies:
        return False
    return (
        max(accuracies) - accuracies[-1]
        > Measured(1 - accuracies[-1], number(found[-1], "count")).noise
    )


def _numbers(lines: Sequence[Fields], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def _errors_text(found: Compared) -> str:
    pairs = (("training", found.train), ("validation", found.validation))
    return ", ".join(
        f"{name} error {percent(each.error)}" for name, each in pairs if each is not None
    )


def _where(found: Compared) -> str:
    """Return the samples and mode of the training error, as text."""
    if not found.is_evaluated or found.train is None:
        return " in the last tenth of an epoch of training steps"
    return f" of {_samples(found.train)} in evaluation mode"


def _samples(measured: Measured) -> str:
    return f"{count(measured.count or 0)} samples"


def _listed(texts: Sequence[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else texts[0]


def _signed(gap: float) -> str:
    return f"{100 * gap:+.1f}"
