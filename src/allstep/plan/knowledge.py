"""What a calibration shows about a cluster: factors, connections and the level of knowledge (D22).

```
contention   all workers of a host, each with its own model, against one alone: memory bus, cores
inside       latency and rate that explain the timed allreduces of a host
overhead     seconds per step that training together takes beyond all of this: headers, messages
link         measured, with the rate that explains the timed allreduces between the hosts
beyond       factor on the computation that explains the step over the hosts, where allreduces were
             timed; without them the difference is put on the rate of the link
```

`measured_parts` reads the first two and the link off a calibration; `prediction.fitted` adds what
steps of workers together show.
"""

import math
from dataclasses import dataclass, replace
from statistics import fmean

from allstep.costs.speed import Speed
from allstep.plan.calibration import Calibration, HostTimes, Sums, profile_at

UNMEASURED_INSIDE = Speed(20e-6, 5e9, math.inf)
"""Connection inside a host where none was measured."""
STRAGGLER = 1.1
"""Factor from which a worker counts as always slower."""


@dataclass(frozen=True)
class Knowledge:
    """What is known of the cluster besides the profile of one worker."""

    level: int
    per_host: int
    """Workers of a host that were measured together."""
    inside: Speed
    link: Speed | None = None
    jitter: float = 0.0
    contention: float = 1.0
    """Factor on the computation when all `per_host` workers of a host are busy."""
    update: float = 1.0
    """The same for the update."""
    input: float = 1.0
    """The same for the input pipeline."""
    overhead: float = 0.0
    """Seconds per step that several workers take beyond the formulas."""
    alone: float = 1.0
    """Factor on the computation of any number of workers."""
    beyond: float = 1.0
    """Factor on the computation over several hosts."""
    slow: float = 1.0
    """Factor by which the slowest worker always takes longer."""
    slowest: int | None = None
    """The rank of that worker."""
    checked: int = 1
    """Largest number of workers that was measured together."""

    def contention_of(self, workers: int) -> float:
        """Return the factor on the computation when `workers` workers of a host are busy."""
        return _part(self.contention, workers, self.per_host)

    def update_of(self, workers: int) -> float:
        """Return the factor on the update when `workers` workers of a host are busy."""
        return _part(self.update, workers, self.per_host)

    def input_of(self, workers: int) -> float:
        """Return the factor on the input when `workers` workers of a host are busy."""
        return _part(self.input, workers, self.per_host)


def measured_parts(calibration: Calibration) -> Knowledge:
    """Return what the measurements show that are not steps of workers together."""
    host, hosts = calibration.host, calibration.hosts
    known = Knowledge(0, 1, UNMEASURED_INSIDE, jitter=calibration.jitter)
    if host is not None:
        known = _with_host(known, calibration, host)
    if hosts is not None:
        known = replace(known, level=3, link=hosts.link, checked=hosts.size)
    return known


def _with_host(known: Knowledge, calibration: Calibration, host: HostTimes) -> Knowledge:
    alone, busy = profile_at(calibration, host.independent.batch), host.independent
    compute = usual_compute(host)
    slow, rank = _straggler(host)
    return replace(
        known,
        level=2,
        per_host=host.workers,
        inside=connection(host.sums, host.workers) if host.sums else known.inside,
        contention=compute / (alone.forward + alone.backward),
        update=busy.update / alone.update if alone.update > 0 else 1.0,
        # Where workers waited for input only when their host was busy.
        input=max(1.0, busy.input / alone.input) if alone.input > 0 else 1.0,
        jitter=max(known.jitter, busy.jitter),
        slow=slow,
        slowest=rank,
        checked=host.workers,
    )


def connection(sums: Sums, workers: int) -> Speed:
    """Return latency and rate inside a host that explain timed allreduces, as well as two can.

    An allreduce moves 2 (L-1)/L n bytes and has 2 (L-1) messages. The fit minimizes the squares of
    the relative errors, with both numbers at least 0.
    """
    steps, share = 2 * (workers - 1), 2 * (workers - 1) / workers
    rows = [(steps / seconds, share * nbytes / seconds) for nbytes, seconds in sums]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    latency = (a1 * bb - b1 * ab) / determinant if determinant > 0 else -1.0
    each = (b1 * aa - a1 * ab) / determinant if determinant > 0 else -1.0
    if latency < 0 or each <= 0:
        latency, each = max(0.0, a1 / aa if each <= 0 < latency else 0.0), b1 / bb
    return Speed(latency, 1 / each, math.inf)


def usual_compute(host: HostTimes) -> float:
    """Return forward and backward of a usual worker of a busy host, without a straggler."""
    _, rank = _straggler(host)
    times = [each for place, each in enumerate(host.by_rank) if place != rank]
    return fmean(times) if times else host.independent.compute


def _straggler(host: HostTimes) -> tuple[float, int | None]:
    """Return how much longer the slowest worker takes, and its rank; 1 if there is none."""
    if len(host.by_rank) < 2:
        return 1.0, None
    rank = max(range(len(host.by_rank)), key=host.by_rank.__getitem__)
    usual = fmean(each for place, each in enumerate(host.by_rank) if place != rank)
    factor = host.by_rank[rank] / usual if usual > 0 else 1.0
    return (factor, rank) if factor >= STRAGGLER else (1.0, None)


def _part(factor: float, workers: int, per_host: int) -> float:
    """Return the factor for some of the workers of a host: none for one, all of it for all."""
    if per_host <= 1 or workers <= 1:
        return 1.0
    return 1.0 + (factor - 1.0) * min(1.0, (workers - 1) / (per_host - 1))
