"""Learning-rate schedules: pure functions of the samples seen.

Samples, not steps: a run with another batch or another number of workers has the same rate at the
same point of its data, and a resumed run needs no state. A factor from 0 to 1 is multiplied on the
peak rate:

```
rate
peak |    /\\__                     warm-up: up to the peak, over the first `warmup` samples (WARM_UPS)
     |   /    \\__                  shape:   from the peak on, over the rest (SCHEDULES)
start|  /        \\__
     +---+-------------+-> samples seen
       warmup        total
```

    lr = peak * warm_up(seen, warmup) * SCHEDULES["cosine"](seen - warmup, total - warmup)

`seen` counts the samples before the step. Shapes with parameters (`steps`, `polynomial`,
`exponential`, `one_cycle`) are made by calling them; SCHEDULES has each with its defaults.
`rate.Rate` puts the parts together.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from allstep.errors import ConfigError

Schedule = Callable[[float, float], float]


def warm_up(seen: float, warmup: float) -> float:
    """Rises in a straight line from 0 to 1 over the first `warmup` samples (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677)."""
    return min(1.0, seen / warmup) if warmup > 0 else 1.0


def constant_warm_up(seen: float, warmup: float) -> float:
    """0 for the first `warmup` samples, then 1.

    Goyal et al. found it worse than a gradual one, and worse than none at batch 8192.
    """
    return float(seen >= warmup)


def no_warm_up(seen: float, warmup: float) -> float:
    """At the peak at once."""
    return 1.0


WARM_UPS: Mapping[str, Schedule] = {
    "gradual": warm_up,
    "constant": constant_warm_up,
    "none": no_warm_up,
}


def constant(seen: float, total: float) -> float:
    """Stays at 1."""
    return 1.0


def cosine(seen: float, total: float) -> float:
    """Falls from 1 to 0 along half a cosine (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983)."""
    return 0.5 * (1.0 + math.cos(math.pi * _done(seen, total)))


def linear(seen: float, total: float) -> float:
    """Falls from 1 to 0 in a straight line."""
    return 1.0 - _done(seen, total)


def steps(at: Sequence[float] = (1 / 3, 2 / 3, 8 / 9), factor: float = 0.1) -> Schedule:
    """Multiplied by `factor` at each of these fractions of the whole.

    By default those of Goyal et al.: epochs 30, 60 and 80 of 90.
    """
    if sorted(at) != list(at) or any(not 0 < each < 1 for each in at):
        raise ConfigError(
            f"steps at {list(at)}: fractions of the run are wanted, rising, above 0 and below 1"
        )
    if not 0 <= factor <= 1:
        raise ConfigError(f"steps by the factor {factor}: a factor from 0 to 1 is wanted")
    return lambda seen, total: factor ** bisect_right(at, _done(seen, total))


def polynomial(power: float = 2.0) -> Schedule:
    """Falls from 1 to 0 as (1 - t)^power; the LARS papers use 2."""
    if not power > 0:
        raise ConfigError(f"a polynomial of power {power} does not fall: the power must be above 0")
    return lambda seen, total: (1.0 - _done(seen, total)) ** power


def exponential(end: float = 0.01) -> Schedule:
    """Falls from 1 to `end`, by the same factor for the same number of samples."""
    if not 0 < end <= 1:
        raise ConfigError(
            f"an exponential that ends at {end} of the peak: it must be above 0 and at most 1"
        )
    return lambda seen, total: end ** _done(seen, total)


def one_cycle(rise: float = 0.3, start: float = 0.04, end: float = 4e-6) -> Schedule:
    """From `start` up to 1 over the part `rise` of the run, then down to `end`, along half cosines
    (Smith and Topin 2017, https://arxiv.org/abs/1708.07120). A warm-up of its own: use no other.
    The defaults are torch's."""
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
    """The part of `total` that is over; nothing is before the start, even of a total that is all
    warm-up."""
    if seen <= 0:
        return 0.0
    return min(1.0, seen / total) if total > 0 else 1.0
