"""The main figures of a run: throughput, epoch time and accuracy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allstep.report.ending import is_finished
from allstep.runlog import RunRecord, number
from allstep.study.recorded.series import counts, samples_per_epoch, steps, validations


@dataclass(frozen=True)
class Glance:
    """The main figures of a run; None if unknown."""

    images_per_second: float | None
    seconds_per_epoch: float | None
    accuracy: float | None
    part: str
    """Split of the accuracy: test, or validation as long as there is no test score."""
    count: int | None
    """Number of samples of that split."""
    top5: float | None = None


def glance(record: RunRecord) -> Glance:
    """Return the main figures from the end line, or from the record so far."""
    end = record.end or {}
    speed = number(end, "images_per_second") or _speed(record)
    size = samples_per_epoch(record)
    epoch = number(end, "seconds_per_epoch") or (size / speed if size and speed else None)
    part, score = _score(record)
    total = number(score, "count")
    return Glance(
        speed,
        epoch,
        number(score, "accuracy"),
        part,
        int(total) if total else None,
        number(score, "top5"),
    )


def _speed(record: RunRecord) -> float | None:
    lines = steps(record)
    # the first line includes the start
    first = 1 if len(lines) > 1 else 0
    spent = sum(number(line, "seconds") or 0.0 for line in lines[first:])
    return sum(counts(lines)[first:]) / spent if spent > 0 else None


def _score(record: RunRecord) -> tuple[str, Mapping[str, Any]]:
    if is_finished(record):
        tests = [line for line in record.evals if line.get("part") == "test"]
        if tests:
            return "test", tests[-1]
    found = validations(record)
    return "validation", found[-1] if found else {}
