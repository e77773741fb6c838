"""The step of a recorded run, as parts that add up to it.

```
step = input + compute + update    own work of a usual worker
     + imbalance                   what the slowest worker takes longer
     + exposed                     communication: what even the slowest worker waits
     + rest                        between the workers' times and the clock of the record
```

A usual worker is the mean of all, or, if one worker holds up the others (`recorded.split`), the
mean of those others. The imbalance is summed over the lines of the record: in each another worker
may be the slowest.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from allstep.runlog import RunRecord, kept, number
from allstep.study.recorded.series import counts
from allstep.study.recorded.split import PHASES, Times, late_worker, timed
from allstep.study.recorded.worlds import longest

PARTS = ("input", "compute", "imbalance", "exposed", "update", "rest")
_WARMING_UP = 1
_SHORTEST = 1e-9
"""Seconds from which own work of a line is a measurement."""
_INPUT, _COMPUTE, _WAIT, _UPDATE = (
    PHASES.index(name) for name in ("input", "compute", "wait", "update")
)


@dataclass(frozen=True)
class MeasuredStep:
    """The mean step of a run."""

    samples: int
    """Samples of a step over all workers."""
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part (`PARTS`); they add up to `seconds`."""
    late: int | None
    """Rank of the worker that holds up the others; None if there is none."""
    lateness: float
    """Own work of that worker divided by that of a usual one; 1 without one."""
    jitter: float
    """Std of a worker's own work in a step, relative to the mean; 0 if it cannot be computed."""

    @property
    def samples_per_second(self) -> float:
        """Speed of all workers."""
        return self.samples / self.seconds

    @cached_property
    def own(self) -> float:
        """Seconds of own work of a usual worker."""
        return sum(self.parts[name] for name in ("input", "compute", "update"))


def measured_step(record: RunRecord, batch: int) -> MeasuredStep | None:
    """Return the mean step of a run with `batch` samples a step; None if it is too short.

    The first line does not count: it includes imports, first allocations and empty queues.
    """
    lines, times = timed(longest(record).lines)
    lines, times = lines[_WARMING_UP:], times[_WARMING_UP:]
    every = kept(record.steps)
    sizes = {id(line): size for line, size in zip(every, counts(every), strict=True)}
    samples = sum(sizes.get(id(line), 0) for line in lines)
    seconds = sum(number(line, "seconds") or 0.0 for line in lines)
    if samples <= 0 or seconds <= 0:
        return None
    late = late_worker(record)
    rank = late.rank if late is not None and times.shape[2] > 1 else None
    scale = batch / samples
    parts, lateness = _parts(times, seconds, rank)
    steps = np.array([sizes.get(id(line), 0) / batch for line in lines])
    return MeasuredStep(
        batch,
        seconds * scale,
        {name: scale * value for name, value in parts.items()},
        rank,
        lateness,
        _jitter(times, steps),
    )


def _parts(times: Times, seconds: float, late: int | None) -> tuple[dict[str, float], float]:
    """Return the sums of the parts, and the lateness of the rank `late`."""
    usual = [rank for rank in range(times.shape[2]) if rank != late]
    own = times[:, (_INPUT, _COMPUTE, _UPDATE)].sum(axis=1)
    all_of = float(times.sum(axis=1).mean(axis=1).sum())
    slowest = float(own.max(axis=1).sum())
    means = times[:, :, usual].mean(axis=2).sum(axis=0)
    usually = float(own[:, usual].mean(axis=1).sum())
    found = {
        "input": float(means[_INPUT]),
        "compute": float(means[_COMPUTE]),
        "imbalance": slowest - usually,
        "exposed": all_of - slowest,
        "update": float(means[_UPDATE]),
        "rest": seconds - all_of,
    }
    lateness = float(own[:, late].sum()) / usually if late is not None and usually > 0 else 1.0
    return found, lateness


def _jitter(times: Times, steps: np.ndarray) -> float:
    """Return the std of a worker's own work in a step, from sums over several steps each."""
    own = times[:, (_INPUT, _COMPUTE, _UPDATE)].sum(axis=1)
    if len(own) < 3 or np.any(steps <= 0) or np.any(own < _SHORTEST):
        return 0.0
    by_step = own / steps[:, None]
    # A line is the mean of its steps, whose std is smaller by the root of their number.
    relative = by_step.std(axis=0, ddof=1) / by_step.mean(axis=0)
    return float(relative.mean()) * math.sqrt(float(np.median(steps)))
