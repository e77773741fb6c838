"""The slow workers and hosts of a run, as rows of a table.

The same search as during the run (`train.watch.straggler_watch`), over the step lines of each world
of the record. It also finds short stretches, which the run does not report.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from allstep.console.quantities import figure, milliseconds, seconds
from allstep.parallel.sync_mode import NAMES, SyncMode
from allstep.runlog import Fields, RunRecord, number
from allstep.study.recorded.series import counts, samples_per_epoch, steps
from allstep.study.recorded.split import PHASES, timed
from allstep.study.recorded.worlds import World, worlds
from allstep.train.watch.claimed_interval import ClaimedIntervals
from allstep.train.watch.straggler_advice import advice
from allstep.train.watch.straggler_watch import NETWORK, Interval, Straggler, StragglerWatch

_CLAIMING = {name for name in NAMES if not SyncMode(name).has_equal_steps}
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
    lines = steps(record)
    sizes = {id(line): size for line, size in zip(lines, counts(lines), strict=True)}
    claims = _mode(record.starts[-1].get("config") if record.starts else None) in _CLAIMING
    return [found for world in worlds(record) for found in _of_world(world, sizes, claims)]


def _of_world(world: World, sizes: Mapping[int, float], claims: bool) -> list[Straggler]:
    """Return the stragglers among the workers of one world.

    `sizes` has the samples since the line before, by `id` of a step line. `claims`: whether the
    workers claim their samples.
    """
    chosen, times = timed(world.lines)
    if not chosen:
        return []
    size = times.shape[2]
    hosts = world.hosts if len(world.hosts) == size else ("",) * size
    watch, claimed = StragglerWatch(hosts, _MIN_INTERVALS, min_seconds=0.0), ClaimedIntervals()
    changes = []
    for line, by_phase in zip(chosen, times, strict=True):
        interval: Interval | None = _interval(line, sizes[id(line)], by_phase.tolist())
        if claims and interval is not None:
            # Lines of earlier versions have no counts: then no worker counts as slow.
            interval = claimed.add(interval, _counts(line, size))
        changes += watch.add(interval) if interval is not None else []
    return [change.straggler for change in changes + watch.close() if change.has_ended]


def _interval(line: Fields, size: float, by_phase: list[list[float]]) -> Interval:
    """Return a step line as an interval.

    At the start of a world the line before it may be older than the interval: steps in between were
    in progress when the world ended, or are repeated. So the line's own speed counts if it has one.
    """
    seconds, speed = number(line, "seconds") or 0.0, number(line, "images_per_second")
    count = float(size) if speed is None else speed * seconds
    times = dict(zip(PHASES, by_phase, strict=True))
    return Interval(int(line["samples"]), count, seconds, times)


def _mode(config: object) -> str:
    """Return the name of the `sync` mode of a recorded config."""
    section = config.get("sync") if isinstance(config, Mapping) else None
    name = section.get("name") if isinstance(section, Mapping) else None
    return name.partition(":")[0] if isinstance(name, str) else "allreduce"


def _counts(line: Fields, size: int) -> list[float]:
    """Return the samples of each worker in a line; zeros if it does not have them."""
    found = line.get("counts")
    values = found if isinstance(found, list) and len(found) == size else [0.0] * size
    numbers = [number({"count": each}, "count") or 0.0 for each in values]
    return [max(0.0, each) for each in numbers]


def _row(found: Straggler, record: RunRecord, config: Mapping[str, object]) -> tuple[str, ...]:
    size = samples_per_epoch(record)
    begin = f"epoch {figure(found.since / size)}" if size else f"sample {found.since:,}"
    batch = number(config, "batch") or 1.0
    mine, usual = (milliseconds(each * batch) for each in (found.mine, found.usual))
    is_even = config.get("shares", "even") == "even"
    return (
        found.name,
        found.part,
        f"{found.factor:.2f} times",
        mine if found.part == NETWORK else f"{mine}, others {usual}",
        begin,
        seconds(found.seconds),
        f"{found.cost:,.0f} of {found.speed + found.cost:,.0f} images/s",
        advice(found, _mode(config), is_even=is_even),
    )
