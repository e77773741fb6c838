"""Training, validation and test error, measured so that they can be compared.

```
                    samples                         weights              mode
training sample     fixed, of the training split    those tested         evaluation    eval line, part "train"
validation          the validation split            the same             evaluation    eval line at the same `samples`
training steps      the last tenth of an epoch      moving               training      step lines up to that evaluation
```

The first two are like with like: same weights, no augmentation, no dropout, plain loss. A run
records the training sample at its end; older runs and runs that were cut off have no such line. For
them the last tenth of an epoch of training steps stands in: the mean over an epoch would be the
error of weights that are long gone. Where the steps were trained under conditions that evaluation
does not have (`obstacles`), their error is too high, so that it can show overfitting but not
underfitting.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.report.ending import is_finished
from allstep.report.series import counts, samples_per_epoch, steps, validations
from allstep.runlog import Fields, RunRecord, number
from allstep.train.config.renamed import with_new_keys

TAIL = 0.1
"""Part of an epoch whose steps stand in for a training sample."""
_DROP_OUT = ("alexnet", "vgg16", "googlenet")
"""Our models that drop out unless `model.options.dropout` is 0."""


@dataclass(frozen=True)
class Measured:
    """The score of one split."""

    error: float
    """Share of wrong samples."""
    count: float | None = None
    """Samples measured."""
    loss: float | None = None

    @property
    def variance(self) -> float:
        """Of the error, as far as the number of samples makes it; 0 where that is unknown.

        The error is taken as (wrong + 1) / (count + 2): 0 wrong of 20 does not mean that the error
        is known to be 0.
        """
        if not self.count or self.count <= 0:
            return 0.0
        share = min(1.0, max(0.0, (self.error * self.count + 1) / (self.count + 2)))
        return share * (1 - share) / self.count

    @property
    def noise(self) -> float:
        """Two standard errors."""
        return 2 * math.sqrt(self.variance)


@dataclass(frozen=True)
class Compared:
    """The splits of a run next to each other. None: not measured."""

    train: Measured | None = None
    validation: Measured | None = None
    test: Measured | None = None
    is_evaluated: bool = False
    """Whether `train` is a training sample in evaluation mode with the weights of `validation`,
    rather than training steps."""
    obstacles: tuple[str, ...] = ()
    """What the training steps had and evaluation has not, in words; empty for a training sample."""

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
    """The training sample next to the validation of the same weights; without one, training steps
    next to the last validation."""
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
    """Training error over the last tenth of an epoch before `validation`; without one, before the
    end."""
    every = steps(record)
    lines = [
        line for line in every if validation is None or line["samples"] <= validation["samples"]
    ]
    if not lines:
        return None
    end = lines[-1]["samples"]
    since = end - TAIL * (samples_per_epoch(record) or end)
    # A line that began before the tail has a share in it: its mean counts for the samples within.
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
    for section, key, words in (
        ("data", "augment", "augmentation"),
        ("data", "mix", "mixed samples"),
        ("", "label_smoothing", "label smoothing"),
        ("ema", "decay", "weights that are not the averaged ones"),
        ("evaluation", "flip", "no mirror images"),
    ):
        value = (_section(config, section) if section else config).get(key)
        if value and value != "none":
            yield words
    if _may_drop_out(_section(config, "model")):
        yield "dropout"


def _may_drop_out(model: Mapping[str, Any]) -> bool:
    """As far as a config tells: a model of the user's own may."""
    name = str(model.get("name"))
    rate = _section(model, "options").get("dropout")
    return ":" in name or bool(rate) or (rate is None and name in _DROP_OUT)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
