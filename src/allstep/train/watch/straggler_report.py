"""The callback that reports a slow worker while the run is going, once it has been slow for long.

```
worker 1 on b is 2.1 times slower than the others, since sample 12,800 (34 s): its compute takes
31 ms a step, that of the others 15 ms; without it the run would do 1,300 instead of 900 images/s;
look for other processes ...; if it stays slow, asynchronous training (sync=async) gains ...
```

The line is an event, so all other callbacks get it: the terminal, the run record, TensorBoard.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from allstep.console.quantities import milliseconds
from allstep.parallel.sync_mode import SyncMode
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.claimed_interval import ClaimedIntervals
from allstep.train.watch.events import Opening, Progress
from allstep.train.watch.straggler_advice import advice
from allstep.train.watch.straggler_watch import (
    NETWORK,
    Change,
    Interval,
    Straggler,
    StragglerWatch,
)


class StragglerReport(Callback):
    """Callback that sends an event to `send` when a worker is slow, and when it no longer is."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._watch, self._claimed = StragglerWatch(()), ClaimedIntervals()
        self._mode, self._is_even = SyncMode(), True

    def start(self, opening: Opening) -> None:
        self._watch = StragglerWatch(opening.hosts)
        self._mode = opening.config.sync.mode
        self._is_even = opening.config.shares == "even"

    def progress(self, progress: Progress) -> None:
        interval = self._interval(progress)
        for change in [] if interval is None else self._watch.add(interval):
            text = described(change, progress.batch, self._mode.name, is_even=self._is_even)
            self._send(text, samples=progress.samples, straggler=_figures(change))

    def _interval(self, progress: Progress) -> Interval | None:
        count = progress.images_per_second * progress.seconds
        interval = Interval(progress.samples, count, progress.seconds, progress.times)
        if self._mode.has_equal_steps or progress.counts is None:
            return interval
        return self._claimed.add(interval, progress.counts)

    def event(self, text: str, **figures: Any) -> None:
        """Watch the workers of the next world of an elastic run, whose change names their hosts."""
        if (hosts := figures.get("hosts")) is None:
            return
        ended, self._watch = self._watch.close(), StragglerWatch(hosts)
        self._claimed = ClaimedIntervals()
        for change in ended:
            found = change.straggler
            when = f"until the workers changed after sample {found.until:,}"
            text = f"{found.name} was slow {when}; {_cost(found)}"
            self._send(text, samples=found.until, straggler=_figures(change))


def with_straggler_report(callbacks: Sequence[Callback]) -> Callbacks:
    """Return the callbacks, with one more that sends them events about slow workers."""
    together = Callbacks(callbacks)
    if callbacks:
        together.callbacks.append(StragglerReport(together.event))
    return together


def described(change: Change, batch: int, sync: str = "allreduce", *, is_even: bool = True) -> str:
    """Return the line about a change.

    batch: converts seconds of a sample to those of a step. sync, is_even: see `advice`.
    """
    found = change.straggler
    if change.has_ended:
        return f"{found.name} is no longer slow since sample {found.until:,}; {_cost(found)}"
    since = f"since sample {found.since:,} ({found.seconds:.0f} s)"
    speed = f"{found.speed + found.cost:,.0f} instead of {found.speed:,.0f} images/s"
    mine, usual = (milliseconds(each * batch) for each in (found.mine, found.usual))
    if found.part == NETWORK:
        slow = f"{found.name} is slow {since}: the exchange takes {mine} of a step"
    else:
        slow = (
            f"{found.name} is {found.factor:.1f} times slower than the others {since}: its"
            f" {found.part} takes {mine} a step, that of the others {usual}"
        )
    return f"{slow}; without it the run would do {speed}; {advice(found, sync, is_even=is_even)}"


def _cost(found: Straggler) -> str:
    return f"it cost {found.cost:,.0f} images/s for {found.seconds:.0f} s"


def _figures(change: Change) -> dict[str, Any]:
    return {**asdict(change.straggler), "has_ended": change.has_ended}
