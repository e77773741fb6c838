"""Finds the worker or host that holds up the others, from the times of all workers.

All workers start and end a step together, so everyone waits for the slowest one: the time that a
worker waits does not show who is slow. The work of each worker does, by phase:

```
worker 0   |input|  compute  |update|             wait                |
worker 1   |input|           compute                  |update|  wait  |   <- slow, in compute
                                                                <----->   the exchange: even the
                                                                          busiest worker waits
```

slow worker    its own work (input, compute, update) is at least 1.3 times the median of the others,
               and the difference at least a tenth of the step
slow host      this holds for each of its workers, against those of other hosts
slow network   between hosts: the exchange takes half of the step

It counts once it has lasted for some intervals and seconds; up to two other intervals in a row may
be in between. The cost is what the run would gain if the slow worker were as fast as the slowest of
the others.

The watch is a pure function of the intervals, so the run and `allstep report` find the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from allstep.train.watch.sync_gains import Gains, gains_of

OWN = ("input", "compute", "update")
NETWORK = "network"
SLOWER = 1.3
_OF_STEP = 0.1
_EXCHANGE_OF_STEP = 0.5
_MAX_MISSES = 2
# Seconds that a clock resolves: ratios of less mean nothing.
_TICK = 1e-9


@dataclass(frozen=True)
class Interval:
    """The times of all workers in some steps."""

    samples: int
    """Position of the run after these steps."""
    count: float
    """Samples of these steps."""
    seconds: float
    times: Mapping[str, Sequence[float]]
    """Seconds of the phases input, compute, wait and update, by rank."""
    elapsed: float | None = None
    """In asynchronous training (`claimed_interval`): the seconds that have passed. `seconds` and
    `times` are then those of a run with even shares in which all workers wait for each other."""

    def own(self, rank: int) -> float:
        """Return the seconds in which a worker did not wait."""
        return sum(self.times[phase][rank] for phase in OWN)


@dataclass(frozen=True)
class Straggler:
    """A worker, host or network that was slow over some intervals."""

    ranks: tuple[int, ...]
    """The slow workers; empty for a slow network."""
    host: str
    """Their host; "" if all workers are on one host, or for a slow network."""
    is_host: bool
    """Whether all workers of the host are slow."""
    part: str
    """Phase in which they lose most: input, compute or update; or network."""
    factor: float
    """Their own work as a multiple of that of the others; for a slow network, the time of a step
    as a multiple of that without the exchange."""
    mine: float
    """Seconds of a sample of the global batch that they spend in this part."""
    usual: float
    """Seconds of a sample that the others spend in it."""
    since: int
    """Position of the run at which it began."""
    until: int
    """Position of the run after its last interval."""
    seconds: float
    """How long it has lasted."""
    speed: float
    """Images per second of the run meanwhile."""
    cost: float
    """Images per second that the run would gain without it."""
    gains: Gains | None = None
    """What other modes of `sync` could gain over waiting for it."""

    @property
    def name(self) -> str:
        """The worker, host or network, as text."""
        if not self.ranks:
            return "the network between the hosts"
        if self.is_host:
            several = "workers" if len(self.ranks) > 1 else "worker"
            return f"host {self.host} ({several} {', '.join(map(str, self.ranks))})"
        return f"worker {self.ranks[0]}" + (f" on {self.host}" if self.host else "")


@dataclass(frozen=True)
class Change:
    """A straggler that was found, or one that has ended."""

    straggler: Straggler
    has_ended: bool = False


@dataclass
class _Streak:
    """Intervals in which the same workers were slow; only their sum is kept."""

    ranks: tuple[int, ...] | None = None
    total: Interval | None = None
    num_intervals: int = 0
    since: int = 0
    misses: int = 0
    is_found: bool = False

    def add(self, interval: Interval) -> None:
        if self.total is None:
            self.since = round(interval.samples - interval.count)
        self.total = interval if self.total is None else _sum(self.total, interval)
        self.num_intervals += 1
        self.misses = 0


class StragglerWatch:
    """The search for stragglers among workers on `hosts`, the host of each rank.

    A straggler is found after `min_intervals` that took at least `min_seconds`.
    """

    def __init__(
        self, hosts: Sequence[str], min_intervals: int = 10, min_seconds: float = 30.0
    ) -> None:
        self._hosts = tuple(hosts)
        self._min_intervals, self._min_seconds = min_intervals, min_seconds
        self._streak = _Streak()

    def add(self, interval: Interval) -> list[Change]:
        """Add the next interval. Return what it shows, most often nothing."""
        slow, ended = slow_ranks(interval, self._hosts), []
        if slow != self._streak.ranks:
            self._streak.misses += 1
            if self._streak.ranks is not None and self._streak.misses <= _MAX_MISSES:
                return []
            ended = self.close()
            self._streak = _Streak(slow)
        if slow is None:
            return ended
        self._streak.add(interval)
        return ended + self._find()

    def close(self) -> list[Change]:
        """End the search. Return the straggler that there is now, with the figures of its time."""
        found, self._streak = self._streak, _Streak()
        return [Change(self._figures(found), has_ended=True)] if found.is_found else []

    def _find(self) -> list[Change]:
        streak = self._streak
        seconds = 0.0 if streak.total is None else _elapsed(streak.total)
        enough = streak.num_intervals >= self._min_intervals and seconds >= self._min_seconds
        if streak.is_found or not enough:
            return []
        streak.is_found = True
        return [Change(self._figures(streak))]

    def _figures(self, streak: _Streak) -> Straggler:
        total, ranks = streak.total, streak.ranks or ()
        assert total is not None
        host = self._hosts[ranks[0]] if ranks and len(set(self._hosts)) > 1 else ""
        is_host = bool(host) and len(ranks) == self._hosts.count(host)
        made = _network(total) if not ranks else _workers(total, ranks)
        elapsed, lost = _elapsed(total), made.lost
        if total.elapsed is not None:
            lost = _lost_claims(total, ranks)
        return Straggler(
            ranks=ranks,
            host=host,
            is_host=is_host,
            part=made.part,
            factor=made.factor,
            mine=made.mine / total.count,
            usual=made.usual / total.count,
            since=streak.since,
            until=total.samples,
            seconds=elapsed,
            speed=total.count / elapsed,
            cost=total.count / (elapsed - lost) - total.count / elapsed,
            gains=_gains(total) if ranks else None,
        )


def slow_ranks(interval: Interval, hosts: Sequence[str]) -> tuple[int, ...] | None:
    """Return the slow workers of an interval; none of them (an empty tuple) for a slow network.

    Return None if no worker is slow.
    """
    ranks = range(len(hosts))
    if len(ranks) < 2 or interval.seconds < _TICK or interval.count <= 0:
        return None
    own = [interval.own(rank) for rank in ranks]
    slowest = max(ranks, key=own.__getitem__)
    neighbours = tuple(rank for rank in ranks if hosts[rank] == hosts[slowest])
    for candidates in dict.fromkeys([neighbours, (slowest,)]):
        others = [own[rank] for rank in ranks if rank not in candidates]
        if others and all(_is_slow(own[rank], others, interval.seconds) for rank in candidates):
            return candidates
    between_hosts = len(set(hosts)) > 1
    exchange = min(interval.times["wait"])
    return () if between_hosts and exchange > _EXCHANGE_OF_STEP * interval.seconds else None


def _is_slow(own: float, others: Sequence[float], seconds: float) -> bool:
    usual = median(others)
    return own >= SLOWER * usual and own - usual >= _OF_STEP * seconds


@dataclass(frozen=True)
class _Loss:
    """What is lost, in seconds of all intervals together."""

    part: str
    factor: float
    mine: float
    usual: float
    lost: float


def _network(total: Interval) -> _Loss:
    exchange = min(total.times["wait"])
    rest = max(total.seconds - exchange, _TICK)
    return _Loss(NETWORK, total.seconds / rest, exchange, 0.0, min(exchange, 0.99 * total.seconds))


def _workers(total: Interval, ranks: Sequence[int]) -> _Loss:
    others = [rank for rank in range(len(total.times["wait"])) if rank not in ranks]

    def compared(phase: str) -> tuple[float, float]:
        times = total.times[phase]
        return median(times[rank] for rank in ranks), median(times[rank] for rank in others)

    part = max(OWN, key=lambda phase: compared(phase)[0] - compared(phase)[1])
    own, usual = (median(map(total.own, each)) for each in (ranks, others))
    lost = max(map(total.own, ranks)) - max(map(total.own, others))
    factor = max(own, _TICK) / max(usual, _TICK)
    return _Loss(part, factor, *compared(part), min(max(0.0, lost), 0.99 * total.seconds))


def _lost_claims(total: Interval, ranks: Sequence[int]) -> float:
    """Return the seconds that are lost where each worker takes as many samples as it can.

    The workers' speeds add up; those of `ranks` would be that of the slowest other one.
    """
    everyone = range(len(total.times["wait"]))
    own = {rank: max(total.own(rank), 1e-9) for rank in everyone}
    slowest = max(own[rank] for rank in everyone if rank not in ranks)
    now = sum(1 / each for each in own.values())
    then = sum(1 / (min(own[rank], slowest) if rank in ranks else own[rank]) for rank in everyone)
    return _elapsed(total) * (1 - now / then)


def _gains(total: Interval) -> Gains | None:
    """Return what other modes could gain if the workers keep these times."""
    pairs = zip(total.times["input"], total.times["compute"], strict=True)
    return gains_of([data + compute for data, compute in pairs], total.times["update"])


def _elapsed(interval: Interval) -> float:
    return interval.seconds if interval.elapsed is None else interval.elapsed


def _sum(first: Interval, second: Interval) -> Interval:
    times = {
        phase: [a + b for a, b in zip(by_rank, second.times[phase], strict=True)]
        for phase, by_rank in first.times.items()
    }
    count, seconds = first.count + second.count, first.seconds + second.seconds
    elapsed = None if second.elapsed is None else _elapsed(first) + second.elapsed
    return Interval(second.samples, count, seconds, times, elapsed)
