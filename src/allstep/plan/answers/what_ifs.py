"""What one change would save, and what limits the speed.

`what_ifs` predicts the step again with each change and lists the time that it saves in an epoch,
best first. `limits` names for each number of workers the part that costs most of the speed that as
many times one worker would have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allstep.costs.allreduce import COSTS
from allstep.plan.answers.question_text import with_change
from allstep.plan.calibration import Calibration
from allstep.plan.knowledge import Knowledge
from allstep.plan.prediction import Prediction, Question, predict
from allstep.plan.simulator import FLAT_RING

NOTABLE = 0.05
"""Part of a step from which a loss is named."""
LOSSES: Mapping[str, str] = {
    "share": "the small shares of the batch: the fixed part of forward and backward",
    "contention": "the host: memory bus and cores are shared by its workers",
    "imbalance": "waiting for the slowest worker",
    "exposed": "communication that no computation hides",
    "update": "the update, which does not get faster with more workers",
    "input": "the input pipeline",
}
ADVICE: Mapping[str, str] = {
    "share": "a larger batch",
    "contention": "fewer workers per host, or hosts with more memory bandwidth",
    "imbalance": "check the slowest host (`allstep doctor` compares hosts), or shares=speed",
    "exposed": "a larger batch or a faster link",
    "update": "a larger batch, or share_weights=true on one host",
    "input": "pack the dataset (`allstep data pack`), or more loader threads",
}


@dataclass(frozen=True)
class WhatIf:
    """A change, and the seconds of an epoch with it and without."""

    change: str
    before: float
    after: float

    @property
    def saved(self) -> float:
        """Seconds of an epoch that the change saves; below 0 if it costs time."""
        return self.before - self.after


def what_ifs(
    calibration: Calibration, known: Knowledge, question: Question, workers: int
) -> list[WhatIf]:
    """Return what each single change saves for this many workers, best first."""
    before = predict(calibration, known, question, workers)
    found = []
    for change in _changes(known, question, before):
        after = predict(calibration, known, with_change(question, change), workers)
        found.append(WhatIf(change, before.epoch, after.epoch))
    return sorted(found, key=lambda each: -each.saved)


def _changes(known: Knowledge, question: Question, before: Prediction) -> list[str]:
    """Return the changes that can be tried."""
    changes = ["batch=2x", "input=2x"]
    if before.workers > 1:
        changes.append("gradients=bfloat16")
    if before.hosts > 1:
        others = [each for each in (*COSTS, FLAT_RING) if each != before.algorithm]
        changes += ["link=2x", "latency=0.5x", *(f"algorithm={each}" for each in others)]
    if max(known.slow, question.slow or 1.0) > 1.0:
        changes.append("slow=1.0")
    return changes


def best_changes(found: Sequence[WhatIf]) -> list[WhatIf]:
    """Return the list with only the best algorithm in it."""
    algorithms = [each for each in found if each.change.startswith("algorithm=")]
    return [each for each in found if each not in algorithms[1:]]


def losses(found: Prediction, one: Prediction) -> dict[str, float]:
    """Return the seconds of a step by which each part keeps it from the ideal.

    one: a single worker. The ideal step takes as long per sample as its step, divided by the number
    of workers. The losses add up to the difference.
    """
    ideal = found.batch / one.samples_per_second / found.workers
    part = ideal / one.seconds
    lost = dict(found.parts)
    share = lost.pop("compute") - part * one.parts["compute"]
    lost["update"] -= part * one.parts["update"]
    lost["input"] -= part * one.parts["input"]
    lost["imbalance"] -= part * one.parts["imbalance"]
    return {"share": share, **lost}


def limit(found: Prediction, one: Prediction) -> str | None:
    """Return the part that costs most; None if no loss is notable."""
    lost = losses(found, one)
    name = max(lost, key=lambda each: lost[each])
    return name if lost[name] >= NOTABLE * found.seconds else None


def limits(rows: Sequence[Prediction], one: Prediction) -> list[str]:
    """Return a line for each range of workers that is limited by the same part."""
    ranges: list[tuple[str | None, list[Prediction]]] = []
    for row in rows:
        name = limit(row, one)
        if ranges and ranges[-1][0] == name:
            ranges[-1][1].append(row)
        else:
            ranges.append((name, [row]))
    return [_line(name, members, one) for name, members in ranges]


def _line(name: str | None, rows: Sequence[Prediction], one: Prediction) -> str:
    first, last = rows[0].workers, rows[-1].workers
    where = f"{first:,} workers" if first == last else f"{first:,} to {last:,} workers"
    where = where.replace("1 workers", "1 worker") if first == last == 1 else where
    if name is None:
        return f"{where}: no loss above {NOTABLE:.0%} of a step"
    parts = [losses(row, one)[name] / row.seconds for row in (rows[0], rows[-1])]
    much = f"{parts[0]:.0%}" if first == last else f"{parts[0]:.0%} to {parts[1]:.0%}"
    return f"{where}: {LOSSES[name]} ({much} of a step); first {ADVICE[name]}"
