"""The slow workers and hosts of a run, as rows of a table.

The same search as during the run (`train.watch.straggler_watch`), over the step lines of the
record. It also finds short stretches, which the run does not report.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from allstep.console.quantities import figure, milliseconds, seconds
from allstep.report.series import counts, samples_per_epoch, steps
from allstep.report.split import PHASES, timed
from allstep.runlog import RunRecord, number
from allstep.train.watch.straggler_report import advice
from allstep.train.watch.straggler_watch import NETWORK, Interval, Straggler, StragglerWatch

# An interval is `log_every` steps, 10 by default.
_MIN_INTERVALS = 5
_MOST = 20

COLUMNS = ("which", "part", "slower", "time a step", "from", "for", "cost", "what to do")


@dataclass(frozen=True)
class Stragglers:
    """Rows of the table, the most costly first, and the number of rows that are left out."""

    rows: tuple[tuple[str, ...], ...]
    left_out: int = 0


def stragglers(record: RunRecord) -> Stragglers | None:
    """Return the slow workers and hosts of a run; None if there are none."""
    found = sorted(find(record), key=lambda each: each.cost * each.seconds, reverse=True)
    if not found:
        return None
    config = record.starts[-1].get("config")
    section = config if isinstance(config, Mapping) else {}
    rows = tuple(_row(each, record, section) for each in found[:_MOST])
    return Stragglers(rows, left_out=len(found) - len(rows))


def find(record: RunRecord) -> list[Straggler]:
    """Return the slow workers and hosts in the order of the run."""
    intervals = _intervals(record)
    if not intervals:
        return []
    watch = StragglerWatch(_hosts(record, intervals[0]), _MIN_INTERVALS, min_seconds=0.0)
    changes = [change for each in intervals for change in watch.add(each)] + watch.close()
    return [change.straggler for change in changes if change.has_ended]


def _intervals(record: RunRecord) -> list[Interval]:
    lines = steps(record)
    sizes = {id(line): size for line, size in zip(lines, counts(lines), strict=True)}
    chosen, times = timed(lines)
    return [
        Interval(
            int(line["samples"]),
            float(sizes[id(line)]),
            number(line, "seconds") or 0.0,
            dict(zip(PHASES, by_phase.tolist(), strict=True)),
        )
        for line, by_phase in zip(chosen, times, strict=True)
    ]


def _hosts(record: RunRecord, interval: Interval) -> list[str]:
    """Return the host of each rank; all the same if the record does not name as many."""
    world, size = record.starts[-1].get("world"), len(interval.times["wait"])
    hosts = world.get("hosts") if isinstance(world, Mapping) else None
    known = isinstance(hosts, list) and len(hosts) == size
    return [str(host) for host in hosts] if known else [""] * size  # type: ignore[union-attr]


def _row(found: Straggler, record: RunRecord, config: Mapping[str, object]) -> tuple[str, ...]:
    size = samples_per_epoch(record)
    begin = f"epoch {figure(found.since / size)}" if size else f"sample {found.since:,}"
    batch = number(config, "batch") or 1.0
    mine, usual = (milliseconds(each * batch) for each in (found.mine, found.usual))
    by_speed = config.get("shares") == "speed"
    return (
        found.name,
        found.part,
        f"{found.factor:.2f} times",
        mine if found.part == NETWORK else f"{mine}, others {usual}",
        begin,
        seconds(found.seconds),
        f"{found.cost:,.0f} of {found.speed + found.cost:,.0f} images/s",
        advice(found, by_speed),
    )
