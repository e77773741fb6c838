"""Training, validation and test error, measured so that they can be compared.

```
                 samples                      weights   mode        lines of the record
training sample  fixed, of training split     tested    evaluation  eval, part "train"
validation       validation split             the same  evaluation  eval at the same `samples`
training steps   last tenth of an epoch       changing  training    step, up to that evaluation
```

The first two are comparable: same weights, no augmentation, no dropout, plain loss. A run records
the training sample at its end; older and interrupted runs have no such line. For them the last
tenth of an epoch of training steps replaces it: the mean over a whole epoch would be the error of
weights that no longer exist. If the steps had conditions that evaluation does not have
(`obstacles`), their error is too high, so that it can show overfitting but not underfitting.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.report.ending import is_finished
from allstep.runlog import Fields, RunRecord, number
from allstep.study.recorded.series import counts, samples_per_epoch, steps, validations
from allstep.train.config.renamed import with_new_keys

TAIL = 0.1
"""Fraction of an epoch whose steps replace a missing training sample."""
_DROP_OUT = ("alexnet", "vgg16", "googlenet")
"""Models of allstep that use dropout unless `model.options.dropout` is 0."""


@dataclass(frozen=True)
class Measured:
    """The score of one split."""

    error: float
    """Fraction of wrong samples."""
    count: float | None = None
    """Number of measured samples; None if unknown."""
    loss: float | None = None

    @property
    def variance(self) -> float:
        """Variance of the error due to the number of samples; 0 if that is unknown.

        The error is estimated as (wrong + 1) / (count + 2): 0 wrong of 20 does not mean that the
        error is known to be 0.
        """
        if not self.count or self.count <= 0:
            return 0.0
        share = min(1.0, max(0.0, (self.error * self.count + 1) / (self.count + 2)))
        return share * (1 - share) / self.count

    @property
    def noise(self) -> float:
        """Two standard errors of the error."""
        return 2 * math.sqrt(self.variance)


@dataclass(frozen=True)
class Compared:
    """The scores of the splits of a run; None if not measured."""

    train: Measured | None = None
    validation: Measured | None = None
    test: Measured | None = None
    is_evaluated: bool = False
    """Whether `train` is a training sample in evaluation mode with the weights of `validation`,
    rather than training steps."""
    obstacles: tuple[str, ...] = ()
    """Conditions of the training steps that evaluation lacks; empty for a training sample."""

    @property
    def gap(self) -> float | None:
        """Validation error minus training error."""
        return (
            None
            if self.train is None or self.validation is None
            else self.validation.error - self.train.error
        )

    @property
    def noise(self) -> float:
        """Two standard errors of the gap."""
        return 2 * math.sqrt(
            sum(each.variance for each in (self.train, self.validation) if each is not None)
        )


def compared(record: RunRecord) -> Compared:
    """Return the training sample with the validation of the same weights.

    Without a training sample, return the training steps with the last validation.
    """
    found = validations(record)
    test = _measured(_last(record, "test")) if is_finished(record) else None
    sample = _last(record, "train")
    same = [
        line for line in found if sample is not None and line["samples"] == sample.get("samples")
    ]
    train = _measured(sample)
    if train is not None and same:
        return Compared(train, _measured(same[-1]), test, is_evaluated=True)
    validation = found[-1] if found else None
    return Compared(
        last_steps(record, validation),
        _measured(validation),
        test,
        obstacles=tuple(_obstacles(record)),
    )


def last_steps(record: RunRecord, validation: Fields | None = None) -> Measured | None:
    """Return the training error over the last tenth of an epoch before `validation` or the end."""
    every = steps(record)
    lines = [
        line for line in every if validation is None or line["samples"] <= validation["samples"]
    ]
    if not lines:
        return None
    end = lines[-1]["samples"]
    since = end - TAIL * (samples_per_epoch(record) or end)
    # A line that starts before the tail counts with its samples that are within the tail.
    parts = [
        (min(size, line["samples"] - since), line)
        for line, size in zip(lines, counts(lines), strict=True)
        if line["samples"] > since and number(line, "accuracy") is not None
    ]
    total = sum(size for size, _ in parts)
    return (
        Measured(1 - _mean(parts, "accuracy"), total, _mean(parts, "loss")) if total > 0 else None
    )


def _mean(parts: Sequence[tuple[float, Fields]], key: str) -> float:
    known = [(size, value) for size, line in parts if (value := number(line, key)) is not None]
    total = sum(size for size, _ in known)
    return sum(size * value for size, value in known) / total if total else 0.0


def _last(record: RunRecord, part: str) -> Fields | None:
    lines = [line for line in record.evals if line.get("part") == part]
    return lines[-1] if lines else None


def _measured(line: Fields | None) -> Measured | None:
    if line is None or (accuracy := number(line, "accuracy")) is None:
        return None
    return Measured(1 - accuracy, number(line, "count"), number(line, "loss"))


def _obstacles(record: RunRecord) -> Iterator[str]:
    config = record.starts[-1].get("config") if record.starts else None
    if not isinstance(config, Mapping):
        return
    config = with_new_keys(config)
    for section, key, text in (
        ("data", "augment", "augmentation"),
        ("data", "mix", "mixed samples"),
        ("", "label_smoothing", "label smoothing"),
        ("ema", "decay", "weights that are not the averaged ones"),
        ("evaluation", "flip", "no flipped images"),
    ):
        value = (_section(config, section) if section else config).get(key)
        if value and value != "none":
            yield text
    if _may_drop_out(_section(config, "model")):
        yield "dropout"


def _may_drop_out(model: Mapping[str, Any]) -> bool:
    """Return whether the model may use dropout, as far as the config shows; a user's model may."""
    name = str(model.get("name"))
    rate = _section(model, "options").get("dropout")
    return ":" in name or bool(rate) or (rate is None and name in _DROP_OUT)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
