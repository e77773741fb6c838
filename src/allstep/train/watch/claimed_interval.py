"""Times of workers that claim their samples, as those of workers with even shares.

In asynchronous training every worker is busy all the time, and a slow one processes fewer samples.
Divided by their samples, the times show it:

```
claimed                          with even shares
worker 0   30 samples in 2 s     20 samples in 1.33 s
worker 1   10 samples in 2 s     20 samples in 4 s        <- slow; a synchronous run would take 4 s
```

So `StragglerWatch` finds slow workers in all modes by the same rule.
"""

from collections.abc import Sequence

from allstep.train.watch.straggler_watch import OWN, Interval


class ClaimedIntervals:
    """Converts intervals, one after the other.

    An interval in which some worker finished no step is added to the next one.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Interval, Sequence[float]]] = []

    def add(self, interval: Interval, claimed: Sequence[float]) -> Interval | None:
        """Return the interval with even shares; None if it is added to the next one.

        claimed: the samples of each worker.
        """
        if self._open and len(self._open[0][1]) != len(claimed):
            self._open.clear()
        self._open.append((interval, claimed))
        samples = [sum(column) for column in zip(*(each for _, each in self._open), strict=True)]
        if not samples or min(samples) <= 0:
            return None
        parts = [each for each, _ in self._open]
        self._open = []
        count = sum(each.count for each in parts)
        factors = [count / len(samples) / each for each in samples]
        times = {
            phase: [
                sum(column) * factor
                for column, factor in zip(
                    zip(*(each.times[phase] for each in parts), strict=True), factors, strict=True
                )
            ]
            for phase in OWN
        }
        own = [sum(column) for column in zip(*times.values(), strict=True)]
        slowest = max(own)
        times["wait"] = [slowest - each for each in own]
        elapsed = sum(each.seconds for each in parts)
        return Interval(interval.samples, count, slowest, times, elapsed)
