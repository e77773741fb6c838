"""What the parties of an asynchronous run did, from the `sync` lines of its record.

```
{"kind": "sync", "samples": 5120, "version": 80, "torn": 0, "parties": {
    "0": {"samples": 3840, "pushes": 60, "waited": 0.4, "ages": {"0": 40, "1": 20},
          "sent": 8640000, "received": 8640000, "read": 79, "made": 80},
    "1": {"samples": 1280, "pushes": 20, "waited": 0.0, "ages": {"2": 5, "3": 15}, ...}}}
```

A line has the figures since the previous synchronization point. `ages` counts pushes by the age of
their gradient: the updates of other parties between the read of the weights and the push. `sent`
and `received` are bytes, `read` and `made` the versions of the last push.

In the other modes all gradients have age 0, and the `step` lines have the rest by rank: seconds of
waiting (`wait`), samples (`counts`), bytes `sent` and `received`, and the `version`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.runlog import Fields, RunRecord, kept, number

# Ages beyond it count as damage.
_LARGEST_AGE = 1_000_000


@dataclass(frozen=True)
class PartyTotals:
    """What one party did in a run."""

    samples: float
    pushes: float
    waited: float
    """Seconds in which it waited before its pushes for other parties."""
    ages: Mapping[int, float]
    """Number of pushes by the age of their gradient."""
    sent: float = 0.0
    """Bytes that it gave to the others."""
    received: float = 0.0
    """Bytes that it took from them."""

    @property
    def mean_age(self) -> float:
        """The mean age of its gradients in updates."""
        return _mean(self.ages)

    @property
    def largest_age(self) -> int:
        """The largest age of a gradient."""
        return max(self.ages, default=0)


@dataclass(frozen=True)
class RecordedSync:
    """The parties of a run by rank, and the number of its synchronization points."""

    parties: Mapping[int, PartyTotals]
    num_points: int

    @property
    def ages(self) -> Mapping[int, float]:
        """Number of pushes of all parties by the age of their gradient."""
        return _added([each.ages for each in self.parties.values()])

    @property
    def effective_age(self) -> float:
        """The mean age of gradients in updates, in which each sample counts once.

        A large push with an old gradient counts more than a small one.
        """
        weights = [(each.samples, each.mean_age) for each in self.parties.values()]
        total = sum(samples for samples, _ in weights)
        return sum(samples * age for samples, age in weights) / total if total else 0.0

    @property
    def effective_rounds(self) -> float:
        """The same in rounds: one update per party is a round."""
        return self.effective_age / len(self.parties)

    @property
    def largest_age(self) -> int:
        """The largest age of a gradient in updates."""
        return max(each.largest_age for each in self.parties.values())


def recorded_sync(record: RunRecord) -> RecordedSync | None:
    """Return what the parties did in a run; None if its record has no such lines."""
    points = [found for line in kept(record.syncs) if (found := parties_of(line))]
    if not points:
        return None
    ranks = sorted({rank for point in points for rank in point})
    by_rank = {rank: [point[rank] for point in points if rank in point] for rank in ranks}
    return RecordedSync({rank: _sum(each) for rank, each in by_rank.items()}, len(points))


def recorded_ranks(record: RunRecord) -> RecordedSync | None:
    """Return what the workers of a synchronous run did, from its step lines; None without bytes.

    Workers of an elastic run count by their rank, whichever workers these were.
    """
    lines = [line for line in kept(record.steps) if _rows(line)]
    sums: dict[int, list[float]] = {}
    for line in lines:
        for rank, row in enumerate(_rows(line)):
            before = sums.setdefault(rank, [0.0] * len(_BY_RANK))
            sums[rank] = [a + b for a, b in zip(before, row, strict=True)]
    if len(sums) < 2:
        return None
    version = max(number(line, "version") or 0.0 for line in lines)
    parties = {
        rank: PartyTotals(samples, version, waited, {0: version} if version else {}, sent, received)
        for rank, (samples, waited, sent, received) in sums.items()
    }
    return RecordedSync(parties, 0)


_BY_RANK = ("counts", "wait", "sent", "received")


def _rows(line: Fields) -> list[list[float]]:
    """Return the figures of each rank in a step line; empty if it has not all of them."""
    columns = [line.get(key) for key in _BY_RANK]
    if not all(isinstance(each, list) for each in columns):
        return []
    rows = [list(row) for row in zip(*columns, strict=False)]
    return [[max(0.0, number({"": each}, "") or 0.0) for each in row] for row in rows]


def parties_of(line: Fields) -> dict[int, PartyTotals]:
    """Return the parties of one line; empty if it is damaged."""
    parties = line.get("parties")
    if not isinstance(parties, Mapping):
        return {}
    return {
        int(rank): _totals(figures)
        for rank, figures in parties.items()
        if rank.isdecimal() and len(rank) < 7 and isinstance(figures, Mapping)
    }


def _totals(figures: Fields) -> PartyTotals:
    samples, pushes, waited, sent, received = (
        max(0.0, number(figures, key) or 0.0)
        for key in ("samples", "pushes", "waited", "sent", "received")
    )
    return PartyTotals(samples, pushes, waited, _ages(figures.get("ages")), sent, received)


def _ages(found: Any) -> dict[int, float]:
    if not isinstance(found, Mapping):
        return {}
    ages = {int(age): number(found, age) for age in found if age.isdecimal() and len(age) < 8}
    return {age: count for age, count in ages.items() if count and count > 0 and age < _LARGEST_AGE}


def _sum(parts: Sequence[PartyTotals]) -> PartyTotals:
    return PartyTotals(
        sum(each.samples for each in parts),
        sum(each.pushes for each in parts),
        sum(each.waited for each in parts),
        _added([each.ages for each in parts]),
        sum(each.sent for each in parts),
        sum(each.received for each in parts),
    )


def _added(histograms: Sequence[Mapping[int, float]]) -> dict[int, float]:
    total: Counter[int] = Counter()
    for each in histograms:
        total.update(each)
    return dict(sorted(total.items()))


def _mean(ages: Mapping[int, float]) -> float:
    total = sum(ages.values())
    return sum(age * count for age, count in ages.items()) / total if total else 0.0
