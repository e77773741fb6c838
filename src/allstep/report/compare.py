"""Several runs beside the first: what more workers, or another setting, changed, in words."""

import math
from typing import Literal

from allstep.console.quantities import count, figure, percent, plural
from allstep.report.glance import Glance, glance
from allstep.report.judgement import Judgement
from allstep.report.run import Run


def compare(runs: list[Run]) -> list[Judgement]:
    """A judgement on each further run beside the first."""
    return [_beside(runs[0], run) for run in runs[1:]]


def speed_up(first: Glance, other: Glance) -> float | None:
    """Images/s over those of the first."""
    if not first.images_per_second or other.images_per_second is None:
        return None
    return other.images_per_second / first.images_per_second


def noise(first: Glance, other: Glance) -> float | None:
    """Two standard errors of the difference of two accuracies: what the size of the test sets alone
    can make."""
    pairs = [(each.accuracy, each.count) for each in (first, other)]
    variance = [max(0.0, a * (1 - a)) / n for a, n in pairs if a is not None and n and n > 0]
    return 2 * math.sqrt(sum(variance)) if len(variance) == 2 else None


def _beside(first: Run, other: Run) -> Judgement:
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
    severity: Literal["good", "hint"] = "hint" if _parted(here, there) or not parts else "good"
    title = f"{other.name} beside {first.name}"
    return Judgement("compare", severity, title, "; ".join(parts) or "there is nothing to compare")


def _speed(first: Run, other: Run, here: Glance, there: Glance) -> str | None:
    ratio = speed_up(here, there)
    if ratio is None or here.images_per_second is None or there.images_per_second is None:
        return None
    said = (
        f"{count(there.images_per_second)} images/s against {count(here.images_per_second)}:"
        f" {figure(round(ratio, 2))}x"
    )
    return (
        said
        if first.num_workers == other.num_workers
        else f"{said} with {_resources(first, other, ratio)}"
    )


def _resources(first: Run, other: Run, ratio: float) -> str:
    """How many workers that took, and what part of the ideal it is: as many times the threads, as
    many times the speed."""
    workers = f"{plural(other.num_workers, 'worker')} against {first.num_workers}"
    threads = (first.num_threads or first.num_workers, other.num_threads or other.num_workers)
    if threads[0] == threads[1]:
        return f"{workers} on as many threads"
    return (
        f"{workers} ({percent(ratio * threads[0] / threads[1], 0)} of"
        f" {figure(threads[1] / threads[0])}x)"
    )


def _accuracy(here: Glance, there: Glance) -> str | None:
    if here.accuracy is None or there.accuracy is None or here.part != there.part:
        return None
    said = f"{there.part} accuracy {percent(there.accuracy, 2)} against {percent(here.accuracy, 2)}"
    limit = noise(here, there)
    if limit is None:
        return said
    verdict = f"{'' if _parted(here, there) else 'no '}further apart than chance makes them"
    return f"{said}, {verdict} (±{100 * limit:.2f} points with {count(there.count or 0)} samples)"


def _parted(here: Glance, there: Glance) -> bool:
    """Whether the accuracies differ by more than chance makes them."""
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
