"""What a study wants to know of a run, from its record.

A run that was cut and resumed tells some of its steps twice; the last telling counts.
"""

import math
from dataclasses import dataclass

from allstep.runlog import Fields, RunRecord, kept, number, timed
from allstep.study.trial import Outcome


@dataclass(frozen=True)
class Reached:
    """When a run first was as good as asked."""

    samples: int
    updates: int
    seconds: float
    """Of training, without evaluations."""


@dataclass(frozen=True)
class RunFigures:
    """One run of a study."""

    name: str
    status: str
    test: float | None
    """Accuracy at the end. For quoting, not for choosing."""
    validation: float | None
    """Accuracy at the end. For choosing."""
    updates: int
    reached: Reached | None

    @property
    def diverged(self) -> bool:
        """Whether its loss left all bounds, which is a result, not an accident."""
        return self.status == "diverged"


def figures(outcome: Outcome, batch: int, goal: float | None) -> RunFigures:
    """What a trial with this batch found."""
    record = outcome.record
    seen = int(kept(record.steps)[-1]["samples"]) if kept(record.steps) else 0
    whole = outcome.status == "done" and not has_diverged(outcome)
    return RunFigures(
        name=outcome.trial.name,
        status="diverged" if has_diverged(outcome) else outcome.status,
        test=_last_accuracy(record, "test") if whole else None,
        validation=_last_accuracy(record, "validation") if whole else None,
        updates=num_updates(record, seen, batch),
        reached=None if goal is None else reached(record, batch, goal),
    )


def has_diverged(outcome: Outcome) -> bool:
    """Whether the loss left all bounds:

    `train` ended the run with an error that says so, or its last loss is no number.
    """
    if outcome.status == "failed":
        return "diverged" in outcome.reason or _told_of_divergence(outcome.record)
    loss = outcome.record.steps[-1].get("loss", 0.0) if outcome.record.steps else 0.0
    return not (isinstance(loss, int | float) and math.isfinite(loss))


def _told_of_divergence(record: RunRecord) -> bool:
    """Whether, since the last start, there is an event with the rate of a step:

    `train` tells that of no other.
    """
    record = timed(record)
    began = record.starts[-1]["time"] if record.starts else 0.0
    return any(
        "lr" in event and "step" in event for event in record.events if event["time"] >= began
    )


def reached(record: RunRecord, batch: int, goal: float) -> Reached | None:
    """At the first evaluation on the validation part with this accuracy; None when there is none."""
    for line in kept(_evaluations(record, "validation")):
        if line["accuracy"] >= goal:
            samples = int(line["samples"])
            return Reached(
                samples, num_updates(record, samples, batch), _training_seconds(record, samples)
            )
    return None


def num_updates(record: RunRecord, samples: int, batch: int) -> int:
    """Of the first so many samples: an epoch's last batch may be smaller, and counts as one."""
    data = record.start.get("data")
    epoch = int(number(data, "train") or 0) if isinstance(data, dict) else 0
    if epoch <= 0:
        return math.ceil(samples / batch)
    return samples // epoch * math.ceil(epoch / batch) + math.ceil(samples % epoch / batch)


def _evaluations(record: RunRecord, part: str) -> list[Fields]:
    return [
        line
        for line in record.evals
        if line.get("part") == part and isinstance(line.get("accuracy"), int | float)
    ]


def _last_accuracy(record: RunRecord, part: str) -> float | None:
    lines = _evaluations(record, part)
    return float(lines[-1]["accuracy"]) if lines else None


def _training_seconds(record: RunRecord, samples: int) -> float:
    return float(
        sum(
            number(line, "seconds") or 0.0
            for line in kept(record.steps)
            if line["samples"] <= samples
        )
    )
