"""The callback that reports a slow worker while the run is going, once it has been slow for long.

```
worker 1 on b is 2.1 times slower than the others, since sample 12,800 (34 s): its compute takes
31 ms a step, that of the others 15 ms; without it the run would do 1,300 instead of 900 images/s;
look for other processes ...
```

The line is an event, so all other callbacks get it: the terminal, the run record, TensorBoard.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from allstep.console.quantities import milliseconds
from allstep.train.watch.callback import Callback, Callbacks
from allstep.train.watch.events import Opening, Progress
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
        self._watch = StragglerWatch(())
        self._by_speed = False

    def start(self, opening: Opening) -> None:
        self._watch = StragglerWatch(opening.hosts)
        config = opening.config
        # Where samples are claimed, shares follow the speed as well.
        self._by_speed = config.shares == "speed" or not config.sync.mode.has_equal_steps

    def progress(self, progress: Progress) -> None:
        count = progress.images_per_second * progress.seconds
        interval = Interval(progress.samples, count, progress.seconds, progress.times)
        for change in self._watch.add(interval):
            text = described(change, progress.batch, self._by_speed)
            self._send(text, samples=progress.samples, straggler=_figures(change))

    def event(self, text: str, **figures: Any) -> None:
        """Watch the workers of the next world of an elastic run, whose change names their hosts."""
        if (hosts := figures.get("hosts")) is None:
            return
        ended, self._watch = self._watch.close(), StragglerWatch(hosts)
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


def described(change: Change, batch: int, by_speed: bool = False) -> str:
    """Return the line about a change. `batch` converts seconds of a sample to those of a step."""
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
    return f"{slow}; without it the run would do {speed}; {advice(found, by_speed)}"


def advice(found: Straggler, by_speed: bool = False) -> str:
    """Return what to do about a straggler. `by_speed`: the shares follow the speed already."""
    if found.part == NETWORK:
        return "compare the hosts with `allstep doctor -H`, or use fewer, larger steps (batch)"
    if found.part == "update" and 0 in found.ranks:
        return "worker 0 also logs and saves: set a larger log_every or save.seconds"
    host = "its host" if found.host else "the machine"
    if found.part == "input":
        return f"check the disk of {host}, set more data.workers, or pack the data"
    shares = "" if by_speed or found.part == "update" else ", or set shares=speed"
    return f"look for other processes and a low clock rate on {host} (`allstep doctor`){shares}"


def _cost(found: Straggler) -> str:
    return f"it cost {found.cost:,.0f} images/s for {found.seconds:.0f} s"


def _figures(change: Change) -> dict[str, Any]:
    return {**asdict(change.straggler), "has_ended": change.has_ended}
