"""What another `sync` mode would gain in a run, or has gained, with the figures behind it.

Of a synchronous run the times of the workers are known, which give the limits of other modes
(`train.watch.sync_gains`). In an asynchronous run the samples by party show the gain: a synchronous
one would have made N times those of the slowest party.
"""

from collections.abc import Mapping

from allstep.console.quantities import figure, percent, plural
from allstep.report.judgement import Judgement
from allstep.report.sync.party_figures import training_seconds
from allstep.runlog import RunRecord, kept
from allstep.study.recorded.split import Split
from allstep.train.watch.recorded_sync import RecordedSync, parties_of, recorded_sync
from allstep.train.watch.sync_gains import GAIN, Gains, gains_of, times

WAITED = 0.1
"""Fraction of its time that a party waits for others, from which the bound costs speed."""
ALWAYS = 0.6
"""Fraction of the synchronization points at which a party is the slowest: then it always is."""


def gains(found: Split) -> Gains | None:
    """Return the possible gains of a run with even shares; None without times."""
    updates = [each["update"] for each in found.ranks]
    works = [found.own(rank) - each for rank, each in enumerate(updates)]
    return gains_of(works, updates)


def in_place_of_waiting(found: Split, shares: object) -> str:
    """Return advice for a run in which one worker is always slower; "" if nothing gains."""
    possible = gains(found)
    if possible is None or possible.asynchronous < GAIN or shares != "even":
        return ""
    return (
        "If it stays slow: asynchronous training (`sync=async`) gains up to"
        f" {times(possible.asynchronous)}; uneven shares (`shares=speed`) gain"
        f" {possible.of_uneven} without staleness."
    )


def asynchronous(record: RunRecord) -> Judgement | None:
    """Judge what a run has gained by its staleness."""
    found = recorded_sync(record)
    if found is None or len(found.parties) < 2:
        return None
    gain = gained(found)
    ages = (
        f"effective staleness {found.effective_age:.2f} updates"
        f" ({found.effective_rounds:.2f} rounds)"
    )
    if gain < GAIN:
        figures = f"all parties processed nearly the same number of samples; {ages}"
        advice = (
            "Compare with `sync=allreduce`: with equal workers staleness buys only the time that"
            " they wait for each other."
        )
        return Judgement("asynchronous", "hint", "The parties are equally fast", figures, advice)
    samples = {rank: each.samples for rank, each in found.parties.items()}
    slowest, fastest = min(samples, key=samples.__getitem__), max(samples, key=samples.__getitem__)
    always = _is_always_slowest(record, slowest)
    factor = figure(round(samples[fastest] / max(1.0, samples[slowest]), 1))
    figures = (
        f"worker {slowest} {'is always' if always else 'was on average'} {factor} times slower than"
        f" worker {fastest}: asynchronous steps gain {times(gain)} over waiting for it;"
        f" {ages}"
    )
    advice = (
        "Uneven shares (`shares=speed` with `sync=allreduce`) gain the same without staleness."
        if always
        else "The slowest worker changes, which uneven shares cannot follow; a bound such as"
        " `sync=stale:2` keeps most of the gain and limits the staleness."
    )
    return Judgement("asynchronous", "hint", "Asynchronous steps gain speed", figures, advice)


def gained(found: RecordedSync) -> float:
    """Return the samples of a run divided by those of a synchronous one of the same time."""
    samples = [each.samples for each in found.parties.values()]
    return sum(samples) / (len(samples) * max(1.0, min(samples)))


def _is_always_slowest(record: RunRecord, rank: int) -> bool:
    points = [found for line in kept(record.syncs) if len(found := parties_of(line)) > 1]
    often = [min(point, key=lambda each: point[each].samples) == rank for point in points]
    return bool(often) and sum(often) / len(often) >= ALWAYS


def bound_waits(record: RunRecord) -> Judgement | None:
    """Judge an asynchronous run whose parties wait for the ages of others."""
    found, spent = recorded_sync(record), training_seconds(record)
    if found is None or not spent:
        return None
    rank = max(found.parties, key=lambda each: found.parties[each].waited)
    share = found.parties[rank].waited / spent
    if share < WAITED:
        return None
    figures = (
        f"party {rank} waited {percent(share, 0)} of the time before its pushes, so that no"
        f" gradient of another one becomes older; the oldest was"
        f" {plural(found.largest_age, 'update')} old"
    )
    advice = "A larger bound waits less: `sync=stale:3`, or `sync=async` for none."
    return Judgement("bound_waits", "hint", "The bound on staleness costs time", figures, advice)


def shares_of(config: Mapping[str, object] | object) -> object:
    """Return the key `shares` of a recorded config; "even" if it has none."""
    return config.get("shares", "even") if isinstance(config, Mapping) else "even"
