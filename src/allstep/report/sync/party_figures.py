"""The parties of an asynchronous run: samples, pushes, waiting, and a histogram of staleness each.

```
(0, 0)                                  viewBox 0 0 400 104 for each party
   LEFT                           RIGHT
     |      ##                      |   TOP: the largest fraction of any party
     |   ## ## ##                   |   one bar for each age, or for a range of ages
     +------------------------------+   BOTTOM
     0      1      2      3              age of a gradient in updates of other parties
```

All parties of a run have the same axes, so that their bars can be compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from allstep.console.quantities import count, figure, nbytes, percent, plural, seconds, times
from allstep.runlog import RunRecord, number
from allstep.study.recorded.series import steps
from allstep.train.watch.recorded_sync import (
    PartyTotals,
    RecordedSync,
    recorded_ranks,
    recorded_sync,
)

WIDTH, HEIGHT = 400, 104
LEFT, RIGHT, TOP, BOTTOM = 8, 392, 8, 84
COLUMNS = ("party", "samples", "pushes", "staleness", "oldest", "waited", "sent", "received")
_MAX_BARS = 24
# Parties whose rows and bars are shown; more would fill the page.
_MAX_PARTIES = 16
# Fraction of the distance between two bars that is empty.
_GAP = 0.15


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram: its place, and its figures as text."""

    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class Histogram:
    """The staleness of one party."""

    rank: int
    bars: tuple[Bar, ...]
    about: str


@dataclass(frozen=True)
class Parties:
    """What the page shows about the parties of a run."""

    rows: tuple[tuple[str, ...], ...]
    histograms: tuple[Histogram, ...]
    ticks: tuple[tuple[float, str], ...]
    """Places on the age axis, and their ages."""
    summary: str
    left_out: int = 0


def parties(record: RunRecord) -> Parties | None:
    """Return the parties of a run; None if it had one worker, or recorded no bytes."""
    asynchronous = recorded_sync(record)
    found = asynchronous or recorded_ranks(record)
    if found is None:
        return None
    spent = training_seconds(record)
    shown = dict(list(found.parties.items())[:_MAX_PARTIES])
    total = sum(each.samples for each in found.parties.values())
    bins = _Bins(found.largest_age, shown)
    return Parties(
        rows=tuple(_row(rank, each, total, spent) for rank, each in shown.items()),
        histograms=tuple(
            bins.histogram(rank, each) for rank, each in shown.items() if asynchronous
        ),
        ticks=bins.ticks(),
        summary=_summary(found) if asynchronous else _SYNCHRONOUS,
        left_out=len(found.parties) - len(shown),
    )


_SYNCHRONOUS = (
    "All workers exchange together, so no gradient is older than the weights that it changes."
    " A worker waits for the slowest one, and for the exchange itself."
)


def training_seconds(record: RunRecord) -> float:
    """Return the seconds of all step lines: without evaluations and the time before a resume."""
    return sum(number(line, "seconds") or 0.0 for line in steps(record))


def _row(rank: int, each: PartyTotals, total: float, spent: float) -> tuple[str, ...]:
    share = f" ({percent(each.samples / total, 0)})" if total else ""
    part = f" ({percent(each.waited / spent)})" if spent else ""
    return (
        str(rank),
        count(each.samples) + share,
        count(each.pushes),
        f"{each.mean_age:.2f}",
        str(each.largest_age),
        seconds(each.waited) + part,
        nbytes(each.sent),
        nbytes(each.received),
    )


def _summary(found: RecordedSync) -> str:
    return (
        f"Effective staleness: {found.effective_age:.2f} updates, or {found.effective_rounds:.2f}"
        f" rounds. The oldest gradient was {plural(found.largest_age, 'update')} old. Parties:"
        f" {len(found.parties)}, synchronized {times(found.num_points)}."
    )


class _Bins:
    """Ages from 0 to the largest one, in ranges of equal width; one age each if they are few."""

    def __init__(self, largest: int, shown: Mapping[int, PartyTotals]) -> None:
        self._width = math.ceil((largest + 1) / _MAX_BARS)
        self._number = largest // self._width + 1
        self._step = (RIGHT - LEFT) / self._number
        self._top = max(max(self._shares(each), default=0.0) for each in shown.values())

    def _shares(self, each: PartyTotals) -> list[float]:
        """Return the fraction of a party's pushes in each range."""
        total, shares = sum(each.ages.values()), [0.0] * self._number
        for age, pushes in each.ages.items():
            shares[age // self._width] += pushes / total
        return shares

    def histogram(self, rank: int, each: PartyTotals) -> Histogram:
        """Return the bars of a party; ranges without a push have none."""
        bars = tuple(
            self._bar(place, share) for place, share in enumerate(self._shares(each)) if share
        )
        parts = ", ".join(bar.text for bar in bars[:_MAX_BARS])
        return Histogram(rank, bars, f"party {rank}: {parts or 'no push'}")

    def _bar(self, place: int, share: float) -> Bar:
        height = (BOTTOM - TOP) * share / self._top
        return Bar(
            x=round(LEFT + (place + _GAP / 2) * self._step, 2),
            y=round(BOTTOM - height, 2),
            width=round(self._step * (1 - _GAP), 2),
            height=round(height, 2),
            text=f"age {self._name(place)}: {percent(share)}",
        )

    def _name(self, place: int) -> str:
        first = place * self._width
        return str(first) if self._width == 1 else f"{first} to {first + self._width - 1}"

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Return about eight places on the axis."""
        every = max(1, math.ceil(self._number / 8))
        return tuple(
            (round(LEFT + (place + 0.5) * self._step, 2), figure(place * self._width))
            for place in range(0, self._number, every)
        )
