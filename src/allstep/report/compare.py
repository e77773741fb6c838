"""Comparison of runs with the first one: what more workers, or other settings, changed."""

import math
from typing import Literal

from allstep.console.quantities import count, figure, percent, plural
from allstep.report.glance import Glance, glance
from allstep.report.judgement import Judgement
from allstep.report.run import Run


def compare(runs: list[Run]) -> list[Judgement]:
    """Return a judgement on each further run compared with the first."""
    return [_compared(runs[0], run) for run in runs[1:]]


def speed_up(first: Glance, other: Glance) -> float | None:
    """Return the images/s of `other` divided by those of `first`; None if one is unknown."""
    if not first.images_per_second or other.images_per_second is None:
        return None
    return other.images_per_second / first.images_per_second


def noise(first: Glance, other: Glance) -> float | None:
    """Return two standard errors of the difference of both accuracies; None if it is unknown.

    Differences below it can come from the limited number of test samples alone.
    """
    pairs = [(each.accuracy, each.count) for each in (first, other)]
    variance = [max(0.0, a * (1 - a)) / n for a, n in pairs if a is not None and n and n > 0]
    return 2 * math.sqrt(sum(variance)) if len(variance) == 2 else None


def _compared(first: Run, other: Run) -> Judgement:
    here, there = glance(first.record), glance(other.record)
    parts = [
        part
        for part in (
            _speed(first, other, here, there),
            _accuracy(here, there),
            _weights(first, other),
        )
        if part
    ]
    severity: Literal["good", "hint"] = "hint" if _differ(here, there) or not parts else "good"
    title = f"{other.name} compared with {first.name}"
    return Judgement("compare", severity, title, "; ".join(parts) or "there is nothing to compare")


def _speed(first: Run, other: Run, here: Glance, there: Glance) -> str | None:
    ratio = speed_up(here, there)
    if ratio is None or here.images_per_second is None or there.images_per_second is None:
        return None
    speeds = (
        f"{count(there.images_per_second)} images/s against {count(here.images_per_second)}:"
        f" {figure(round(ratio, 2))}x"
    )
    return (
        speeds
        if first.num_workers == other.num_workers
        else f"{speeds} with {_resources(first, other, ratio)}"
    )


def _resources(first: Run, other: Run, ratio: float) -> str:
    """Return the numbers of workers and the speed-up as a fraction of the ratio of threads."""
    workers = f"{plural(other.num_workers, 'worker')} against {first.num_workers}"
    threads = (first.num_threads or first.num_workers, other.num_threads or other.num_workers)
    if threads[0] == threads[1]:
        return f"{workers} on the same number of threads"
    return (
        f"{workers} ({percent(ratio * threads[0] / threads[1], 0)} of"
        f" {figure(threads[1] / threads[0])}x)"
    )


def _accuracy(here: Glance, there: Glance) -> str | None:
    if here.accuracy is None or there.accuracy is None or here.part != there.part:
        return None
    pair = f"{there.part} accuracy {percent(there.accuracy, 2)} against {percent(here.accuracy, 2)}"
    limit = noise(here, there)
    if limit is None:
        return pair
    verdict = f"{'more' if _differ(here, there) else 'not more'} than chance explains"
    return f"{pair}, {verdict} (±{100 * limit:.2f} points with {count(there.count or 0)} samples)"


def _differ(here: Glance, there: Glance) -> bool:
    """Return whether the accuracies differ by more than chance explains."""
    limit = noise(here, there) if here.part == there.part else None
    return limit is not None and abs((here.accuracy or 0.0) - (there.accuracy or 0.0)) > limit


def _weights(first: Run, other: Run) -> str | None:
    here, there = (_last_weights(run) for run in (first, other))
    if here is None or there is None:
        return None
    return "the last weights are equal, bit by bit" if here == there else None


def _last_weights(run: Run) -> str | None:
    if not run.checkpoints:
        return None
    return next(
        (checksum for name, _, checksum in run.checkpoints[-1].files if name.startswith("weights")),
        None,
    )
