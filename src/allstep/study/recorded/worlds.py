"""The worlds of a run, one after the other, each with its hosts and its step lines.

```
start ─ steps ─ change of the workers ─ steps ─ resumed on other hosts ─ steps
|-- world ----| |-- world, of an elastic run --| |-- world -------------------|
```

The ranks of two worlds are different workers, also where their number is the same: a spare has
replaced a lost one. A run that is resumed on the same hosts continues its world.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from allstep.runlog import Fields, RunRecord
from allstep.study.recorded.series import change_lines, steps


@dataclass(frozen=True)
class World:
    """A world of a recorded run."""

    hosts: tuple[str, ...]
    """Host of each rank; empty if the record does not name them."""
    lines: tuple[Fields, ...]
    """Its step lines, each step once."""


def worlds(record: RunRecord) -> list[World]:
    """Return the worlds of a run that have step lines, in their order."""
    begins = _begins(record)
    times = [time for time, _ in begins]

    def number_of(line: Fields) -> int:
        return max(0, bisect_right(times, line["time"]) - 1)

    return [
        World(begins[number][1] if begins else (), tuple(lines))
        for number, lines in groupby(steps(record), number_of)
    ]


def longest(record: RunRecord) -> World:
    """Return the world with the most step lines, of equal ones the last.

    Figures of single ranks are those of this world: in another one, a rank is another worker.
    """
    found = reversed(worlds(record))
    return max(found, key=lambda world: len(world.lines), default=World((), ()))


def _begins(record: RunRecord) -> list[tuple[float, tuple[str, ...]]]:
    """Return the time of the first line of each world, and the hosts of its ranks."""
    starts = [(line["time"], False, _hosts(line.get("world"))) for line in record.starts]
    changes = [(line["time"], True, _hosts(line)) for line in change_lines(record)]
    begins: list[tuple[float, tuple[str, ...]]] = []
    for time, is_change, hosts in sorted(starts + changes, key=lambda each: each[0]):
        if is_change or not begins or hosts != begins[-1][1]:
            begins.append((time, hosts))
    return begins


def _hosts(fields: object) -> tuple[str, ...]:
    hosts = fields.get("hosts") if isinstance(fields, Mapping) else None
    return tuple(map(str, hosts)) if isinstance(hosts, list) else ()
