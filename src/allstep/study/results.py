"""The figures of a run that studies compare, from its run record.

A run that was interrupted and resumed records some steps twice; the last record of a step counts.
"""

import math
from dataclasses import dataclass

from allstep.runlog import Fields, RunRecord, kept, number, timed
from allstep.study.trial import Outcome


@dataclass(frozen=True)
class Reached:
    """When a run first reached the goal: samples, updates and seconds until then."""

    samples: int
    updates: int
    seconds: float
    """Seconds of training, without evaluations."""


@dataclass(frozen=True)
class RunFigures:
    """The figures of one run of a study."""

    name: str
    status: str
    test: float | None
    """Test accuracy at the end: quoted, but not used to choose between runs."""
    validation: float | None
    """Validation accuracy at the end: used to choose between runs."""
    updates: int
    reached: Reached | None

    @property
    def diverged(self) -> bool:
        """Whether the loss diverged, which is a result and not a failure."""
        return self.status == "diverged"


def figures(outcome: Outcome, batch: int, goal: float | None) -> RunFigures:
    """Return the figures of a trial with this `batch`; `goal` is a validation accuracy."""
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
    """Return whether the loss diverged.

    Either `train` ended the run with an error about divergence, or the last loss is not finite.
    """
    if outcome.status == "failed":
        return "diverged" in outcome.reason or _recorded_divergence(outcome.record)
    loss = outcome.record.steps[-1].get("loss", 0.0) if outcome.record.steps else 0.0
    return not (isinstance(loss, int | float) and math.isfinite(loss))


def _recorded_divergence(record: RunRecord) -> bool:
    """Return whether an event since the last start has a step and its learning rate.

    `train` records these fields only for divergence.
    """
    record = timed(record)
    began = record.starts[-1]["time"] if record.starts else 0.0
    return any(
        "lr" in event and "step" in event for event in record.events if event["time"] >= began
    )


def reached(record: RunRecord, batch: int, goal: float) -> Reached | None:
    """Return when the validation accuracy was first at least `goal`; None if it never was."""
    for line in validations(record):
        if line["accuracy"] >= goal:
            samples = int(line["samples"])
            return Reached(
                samples, num_updates(record, samples, batch), _training_seconds(record, samples)
            )
    return None


def validations(record: RunRecord) -> list[Fields]:
    """Return the evaluations on the validation split, each once, in order."""
    return kept(_evaluations(record, "validation"))


def num_updates(record: RunRecord, samples: int, batch: int) -> int:
    """Return the updates of the first `samples` samples; a smaller last batch counts as one."""
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
