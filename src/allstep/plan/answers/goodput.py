"""From images/s to the time until a goal: goodput.

```
updates(B) = Smin + Emin / B            from a study; Emin / Smin is the critical batch
hours      = updates(B) x step(p, B / p)
cost       = p x hours
```

A larger batch makes better use of many workers and worse use of each sample. Without overlap the
best batch is B* = sqrt(Bcrit p (t0 + exposed) / tau): the geometric mean of the critical batch and
of what the cluster computes during its fixed costs. It grows with the square root of the number of
workers. The best batch of the table is found by search over powers of two, with the whole step.

Where only the noise scale of a run is known, it is used as the critical batch; then ratios of times
are known, and hours are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2, sqrt

from allstep.plan.calibration import Calibration, fixed_part, per_sample
from allstep.plan.knowledge import Knowledge
from allstep.plan.prediction import Prediction, Question, predict

WORTH_DOUBLING = 2 / 3
"""Largest ratio of the times after and before a doubling that is still worth it."""
_LARGEST_BATCH = 2**26


@dataclass(frozen=True)
class Progress:
    """The updates that a goal needs by batch: Smin + Emin / B."""

    fewest_updates: float
    fewest_samples: float
    source: str
    is_ratio: bool = False
    """Whether only the critical batch is known, so that times are relative."""

    def updates(self, batch: float) -> float:
        """Return the updates to the goal with this batch."""
        return self.fewest_updates + self.fewest_samples / batch

    @property
    def critical_batch(self) -> float:
        """The batch that needs twice the fewest updates and twice the fewest samples."""
        return self.fewest_samples / self.fewest_updates


@dataclass(frozen=True)
class Goal:
    """The best way to the goal for a number of workers."""

    best: Prediction
    seconds: float
    """Until the goal; relative if only the critical batch is known."""
    closed_form: float
    """The best batch by the formula."""

    @property
    def workers(self) -> int:
        return self.best.workers

    @property
    def batch(self) -> int:
        """The best batch found by search."""
        return self.best.batch

    @property
    def worker_hours(self) -> float:
        """Cost: workers times hours."""
        return self.workers * self.seconds / 3600


def best_way(
    calibration: Calibration,
    known: Knowledge,
    question: Question,
    progress: Progress,
    workers: int,
    most_each: int | None = None,
) -> Goal:
    """Return the best batch and its time for this many workers.

    most_each: the most samples that fit into the memory of a worker; None: no limit.
    """
    ways = [
        predict(calibration, known, replace(question, batch=batch, batch_per_worker=None), workers)
        for batch in _batches(workers, most_each, calibration.num_train)
    ]
    best = min(ways, key=lambda each: progress.updates(each.batch) * each.seconds)
    seconds = progress.updates(best.batch) * best.seconds
    return Goal(best, seconds, _closed_form(calibration, progress, best))


def _batches(workers: int, most_each: int | None, num_train: int) -> list[int]:
    """Return the powers of two that have a sample for each worker, and fit.

    A batch beyond the training split, of num_train samples, has no update in an epoch: the power
    of two above it is the last.
    """
    most = max(workers, 2 * num_train or _LARGEST_BATCH)
    most = most if most_each is None else min(most, workers * most_each)
    powers = [2**i for i in range(27) if workers <= 2**i <= most]
    return powers or [min(most, max(workers, 1))]


def _closed_form(calibration: Calibration, progress: Progress, best: Prediction) -> float:
    parts = best.parts
    fixed = fixed_part(calibration) + parts["update"] + parts["exposed"]
    return sqrt(
        progress.critical_batch * best.workers * max(fixed, 1e-12) / per_sample(calibration)
    )


def efficiency(goal: Goal, one: Goal) -> float:
    """Return the goodput efficiency: the worker-hours of one worker by those of all."""
    return one.worker_hours / goal.worker_hours


@dataclass(frozen=True)
class Recommendation:
    """A number of workers, or none, and the rule that chose it."""

    chosen: Goal | None
    rule: str


def recommend(
    goals: Sequence[Goal],
    deadline: float | None = None,
    budget: float | None = None,
    price: float | None = None,
) -> Recommendation:
    """Return the recommended number of workers.

    deadline: seconds; the fewest workers that meet it. budget: worker-hours, or money with a
    price; the fastest that it pays. Without either each doubling must save a third of the time.
    """
    affordable = [
        each for each in goals if budget is None or each.worker_hours * (price or 1.0) <= budget
    ]
    if deadline is not None:
        rule = f"the fewest workers that reach the goal within {deadline / 3600:.3g} h"
        rule += "" if budget is None else " and the budget"
        in_time = [each for each in affordable if each.seconds <= deadline]
        return Recommendation(min(in_time, key=lambda each: each.workers, default=None), rule)
    if budget is not None:
        rule = f"the fastest that costs at most {budget:g}"
        return Recommendation(min(affordable, key=lambda each: each.seconds, default=None), rule)
    return Recommendation(_by_doublings(goals), "each doubling must save a third of the time")


def _by_doublings(goals: Sequence[Goal]) -> Goal | None:
    """Return the last row up to which every doubling saves enough."""
    chosen = None
    for goal in goals:
        if chosen is not None:
            doublings = log2(goal.workers / chosen.workers)
            if goal.seconds > chosen.seconds * WORTH_DOUBLING**doublings * (1 + 1e-9):
                break
        chosen = goal
    return chosen
