"""Several runs beside the first: what more workers, or another setting, changed, in words."""

import math

from allstep.report.glance import Glance, glance
from allstep.report.judge import Judgement
from allstep.report.run import Run
from allstep.report.wording import count, figure, percent, plural


def compare(runs: list[Run]) -> list[Judgement]:
    """A judgement on each further run beside the first."""
    return [_beside(runs[0], run) for run in runs[1:]]


def speed_up(first: Glance, other: Glance) -> float | None:
    """Images/s over those of the first."""
    if not first.images_per_second or other.images_per_second is None:
        return None
    return other.images_per_second / first.images_per_second


def noise(first: Glance, other: Glance) -> float | None:
    """Two standard errors of the difference of two accuracies: what the size of the test sets alone can make."""
    pairs = [(each.accuracy, each.count) for each in (first, other)]
    variance = [a * (1 - a) / n for a, n in pairs if a is not None and n]
    return 2 * math.sqrt(sum(variance)) if len(variance) == 2 else None


def _beside(first: Run, other: Run) -> Judgement:
    here, there = glance(first.record), glance(other.record)
    parts = [
        part for part in (_speed(first, other, here, there), _accuracy(here, there), _weights(first, other)) if part
    ]
    is_fine = "further apart" not in "".join(parts)
    title = f"{other.name} beside {first.name}"
    return Judgement("compare", "good" if is_fine else "hint", title, "; ".join(parts) or "nothing to compare yet")


def _speed(first: Run, other: Run, here: Glance, there: Glance) -> str | None:
    ratio = speed_up(here, there)
    if ratio is None or here.images_per_second is None or there.images_per_second is None:
        return None
    said = (
        f"{count(there.images_per_second)} images/s against {count(here.images_per_second)}: {figure(round(ratio, 2))}x"
    )
    workers = other.num_workers / first.num_workers
    if workers == 1:
        return said
    more = f"{plural(other.num_workers, 'worker')} against {first.num_workers}"
    return f"{said} with {more} ({percent(ratio / workers, 0)} of {figure(workers)}x)"


def _accuracy(here: Glance, there: Glance) -> str | None:
    if here.accuracy is None or there.accuracy is None or here.part != there.part:
        return None
    said = f"{there.part} accuracy {percent(there.accuracy, 2)} against {percent(here.accuracy, 2)}"
    limit = noise(here, there)
    if limit is None:
        return said
    near = abs(here.accuracy - there.accuracy) <= limit
    verdict = "no further apart than chance makes them" if near else "further apart than chance makes them"
    return f"{said}, {verdict} (±{100 * limit:.2f} points with {count(there.count or 0)} samples)"


def _weights(first: Run, other: Run) -> str | None:
    here, there = (_last_weights(run) for run in (first, other))
    if here is None or there is None:
        return None
    return "the last weights are equal, bit by bit" if here == there else None


def _last_weights(run: Run) -> str | None:
    if not run.checkpoints:
        return None
    return next((checksum for name, _, checksum in run.checkpoints[-1].files if name.startswith("weights")), None)
