"""Learning-rate schedules: pure functions of the samples seen.

They count samples instead of steps: a run with another batch or another number of workers has the
same learning rate at the same point of its data, and a resumed run needs no state. A factor from 0
to 1 is multiplied by the peak learning rate:

```
lr
peak |    /\\__                   warm-up: to the peak, in the first `warmup` samples (WARM_UPS)
     |   /    \\__                shape:   from the peak on, over the rest (SCHEDULES)
start|  /        \\__
     +---+-------------+-> samples seen
       warmup        total
```

    lr = peak * warm_up(seen, warmup) * SCHEDULES["cosine"](seen - warmup, total - warmup)

All schedules have two arguments: `seen`, the samples before the step, and `total` (or `warmup`),
the samples of the whole schedule. Schedules with parameters (`steps`, `polynomial`, `exponential`,
`one_cycle`) are made by calling them; SCHEDULES has each with its defaults. `rate.Rate` combines
warm-up and schedule.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from allstep.errors import ConfigError

Schedule = Callable[[float, float], float]


def warm_up(seen: float, warmup: float) -> float:
    """Return a factor that rises linearly from 0 to 1 over the first `warmup` samples.

    `seen`: samples before the step. Goyal et al. 2017, https://arxiv.org/abs/1706.02677.
    """
    return min(1.0, seen / warmup) if warmup > 0 else 1.0


def constant_warm_up(seen: float, warmup: float) -> float:
    """Return 0 for the first `warmup` samples, then 1.

    Goyal et al. found it worse than a gradual one, and worse than none at batch 8192.
    """
    return float(seen >= warmup)


def no_warm_up(seen: float, warmup: float) -> float:
    """Return 1: the peak from the start."""
    return 1.0


WARM_UPS: Mapping[str, Schedule] = {
    "gradual": warm_up,
    "constant": constant_warm_up,
    "none": no_warm_up,
}


def constant(seen: float, total: float) -> float:
    """Return 1.

    `seen`: samples before the step. `total`: samples of the schedule.
    """
    return 1.0


def cosine(seen: float, total: float) -> float:
    """Return a factor that falls from 1 to 0 along half a cosine.

    `seen`: samples before the step. `total`: samples of the schedule. Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983.
    """
    return 0.5 * (1.0 + math.cos(math.pi * _done(seen, total)))


def linear(seen: float, total: float) -> float:
    """Return a factor that falls linearly from 1 to 0.

    `seen`: samples before the step. `total`: samples of the schedule.
    """
    return 1.0 - _done(seen, total)


def steps(at: Sequence[float] = (1 / 3, 2 / 3, 8 / 9), factor: float = 0.1) -> Schedule:
    """Return a schedule that is multiplied by `factor` at each of several points.

    `at`: the points, as fractions of the schedule; the default is that of Goyal et al.: epochs 30,
    60 and 80 of 90. `factor`: default 0.1.
    """
    if sorted(at) != list(at) or any(not 0 < each < 1 for each in at):
        raise ConfigError(
            f"steps at {list(at)}: expected rising fractions of the run, above 0 and below 1"
        )
    if not 0 <= factor <= 1:
        raise ConfigError(f"steps by the factor {factor}: expected a factor from 0 to 1")
    return lambda seen, total: factor ** bisect_right(at, _done(seen, total))


def polynomial(power: float = 2.0) -> Schedule:
    """Return a schedule that falls from 1 to 0 as (1 - t)^power; default 2, as for LARS."""
    if not power > 0:
        raise ConfigError(f"a polynomial of power {power} does not fall: the power must be above 0")
    return lambda seen, total: (1.0 - _done(seen, total)) ** power


def exponential(end: float = 0.01) -> Schedule:
    """Return a schedule that falls exponentially from 1 to `end` (default: 0.01)."""
    if not 0 < end <= 1:
        raise ConfigError(
            f"an exponential that ends at {end} of the peak: it must be above 0 and at most 1"
        )
    return lambda seen, total: end ** _done(seen, total)


def one_cycle(rise: float = 0.3, start: float = 0.04, end: float = 4e-6) -> Schedule:
    """Return a schedule that rises from `start` to 1 and falls to `end`, along half cosines.

    `rise`: the fraction of the run in which it rises (default: 0.3). `start`, `end`: factors of the
    peak (default: 0.04 and 4e-6). The defaults are torch's. It includes a warm-up: use no other.
    Smith and Topin 2017, https://arxiv.org/abs/1708.07120.
    """
    if not (0 < rise < 1 and 0 <= start <= 1 and 0 <= end <= 1):
        raise ConfigError(
            f"one_cycle(rise={rise}, start={start}, end={end}): rise between 0 and 1, the others"
            " from 0 to 1"
        )

    def factor(seen: float, total: float) -> float:
        done = _done(seen, total)
        if done <= rise:
            return 1.0 - (1.0 - start) * cosine(done, rise)
        return end + (1.0 - end) * cosine(done - rise, 1.0 - rise)

    return factor


SCHEDULES: Mapping[str, Schedule] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": steps(),
    "polynomial": polynomial(),
    "exponential": exponential(),
    "one-cycle": one_cycle(),
}


def _done(seen: float, total: float) -> float:
    """Return the fraction of `total` that is over; 0 at the start, even if `total` is 0."""
    if seen <= 0:
        return 0.0
    return min(1.0, seen / total) if total > 0 else 1.0
