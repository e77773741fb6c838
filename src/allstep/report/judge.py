"""What the curves of a run mean, in words, each with the figures that led to it.

A rule is a pure function from a record to a judgement, or to None when it has nothing to say. They
look at

    fit         training error next to validation error, and whether a run was long enough to judge by them (`fit`)
    curves      spikes of the loss, a validation loss that turned, a run that ended while it still improved
    times       input, the slowest worker, waiting for gradients
"""

from collections.abc import Sequence
from statistics import mean, median

from allstep.console.quantities import figure, percent, seconds
from allstep.report import fit
from allstep.report.compared import Compared
from allstep.report.ending import (
    divergence,
    is_finished,
    last_time,
    noise_advice,
    silence_timeout,
    pause,
)
from allstep.report.judgement import Judgement, Rule
from allstep.report.series import samples_per_epoch, steps, whole
from allstep.report.split import slowest_by_line, split
from allstep.runlog import Fields, RunRecord, number

SPIKE_FACTOR, SPIKE_OF_FIRST, SPIKE_WINDOW = 2.0, 0.1, 10
"""A loss of twice what the ten lines before had, higher by a tenth of the loss at the start."""
INPUT_SHARE = 0.15
LATENESS, LATE_OFTEN = 1.15, 0.6
"""Own work of the slowest over the median of the others, and how often it must be the slowest."""
WAIT_SHARE = 0.25


def judge(record: RunRecord, now: float) -> list[Judgement]:
    """All that can be said about a run at the time `now`; when no rule finds fault, that."""
    seen = fit.look(record)
    found = [
        unfinished(record, now),
        *(rule(seen) for rule in fit.RULES),
        *(rule(record) for rule in RULES),
    ]
    said = [judgement for judgement in found if judgement is not None] or [
        all_well(record, seen.errors)
    ]
    return [*said, *batch_by_noise(record)]


def unfinished(record: RunRecord, now: float) -> Judgement | None:
    """A run without an end: diverged, told to stop, still going, or killed."""
    if is_finished(record):
        return None
    if event := divergence(record):
        return _diverged(record, event)
    if event := pause(record):
        advice = "That is no failure: `allstep train --resume auto` goes on from there."
        return Judgement(
            "unfinished", "hint", "The run was told to stop", str(event.get("text")), advice
        )
    silence = max(0.0, now - last_time(record))
    place = f"{_progress(record)}; last word {seconds(silence)} ago"
    if silence < silence_timeout(record):
        return Judgement(
            "unfinished", "hint", "The run is still going", place, "Ask for the report again later."
        )
    told = f"; its last event: {record.events[-1].get('text')}" if record.events else ""
    advice = (
        "It was stopped or killed, or it hangs. `allstep train --resume auto` goes on from its last"
        " checkpoint."
    )
    return Judgement("unfinished", "problem", "The run did not end", place + told, advice)


def _diverged(record: RunRecord, event: Fields) -> Judgement:
    """What the run itself said when it gave up."""
    rate, place = (
        number(event, "lr"),
        None if number(event, "samples") is None else _at(record, event),
    )
    parts = [
        str(event.get("text")),
        place,
        None if rate is None else f"at a rate of {figure(rate)}",
    ]
    figures = ", ".join(part for part in parts if part)
    advice = (
        "A lower rate, a longer warm-up, `optimizer.clip=1`; the output of the run named the"
        " samples of that step. `--resume auto` would go on from the last good checkpoint, into the"
        " same step."
    )
    return Judgement("unfinished", "problem", "The run diverged", figures, advice)


def batch_by_noise(record: RunRecord) -> list[Judgement]:
    """What the run said about its noise scale; beside the rules, since it finds no fault."""
    event = noise_advice(record)
    if event is None:
        return []
    figures = str(event.get("text")).rstrip(".")
    return [Judgement("batch_by_noise", "good", "How large the batch could be", figures)]


def loss_spikes(record: RunRecord) -> Judgement | None:
    """The training loss jumped."""
    lines = [line for line in whole(steps(record)) if number(line, "loss") is not None]
    spikes = _spikes(_numbers(lines, "loss"))
    if not spikes:
        return None
    worst = max(spikes, key=lambda i: lines[i]["loss"])
    usual = median(_numbers(lines[max(0, worst - SPIKE_WINDOW) : worst], "loss"))
    rate = "" if (lr := number(lines[worst], "lr")) is None else f", at a rate of {figure(lr)}"
    figures = (
        f"{'once' if len(spikes) == 1 else f'{len(spikes)} times, the worst'}"
        f" {_at(record, lines[worst])}: {figure(usual)} to {figure(lines[worst]['loss'])}{rate}"
    )
    advice = "A lower rate, a longer warm-up, gradient clipping; look at the samples of that step."
    return Judgement("loss_spikes", "problem", "The training loss spiked", figures, advice)


def input_bound(record: RunRecord) -> Judgement | None:
    """Workers wait for data."""
    found = split(record)
    if found is None:
        return None
    ranks = range(len(found.ranks))
    rank = max(ranks, key=lambda each: found.share(each, "input"))
    share = found.share(rank, "input")
    if share < INPUT_SHARE:
        return None
    usual = mean(found.share(each, "input") for each in ranks)
    figures = (
        f"{percent(share, 0)} of worker {rank}'s time is waiting for input (mean of all"
        f" {percent(usual, 0)})"
    )
    advice = (
        "Pack the set (`allstep data pack`, `--max-side`, `--raw`), a faster disk, more cores,"
        " fewer augmentations."
    )
    return Judgement("input_bound", "problem", "The run waits for its data", figures, advice)


def straggler(record: RunRecord) -> Judgement | None:
    """One worker is slower than the others, again and again."""
    found = split(record)
    if found is None or found.lateness < LATENESS:
        return None
    rank = found.slowest
    slowest = slowest_by_line(record)
    often = slowest.count(rank) / len(slowest)
    if often < LATE_OFTEN:
        return None
    figures = (
        f"worker {rank}{_host(record, rank)} works {found.lateness:.3g} times as long as the"
        f" others, and was the slowest in {percent(often, 0)} of {len(slowest)} intervals"
    )
    advice = (
        "Look what else runs there, at its clock and its disk; `allstep doctor` compares the hosts."
    )
    return Judgement("straggler", "problem", "One worker holds up the others", figures, advice)


def waiting(record: RunRecord) -> Judgement | None:
    """Even the worker that waits least waits long: gradients take their time."""
    found = split(record)
    if found is None or len(found.ranks) < 2:
        return None
    least = min(found.share(rank, "wait") for rank in range(len(found.ranks)))
    if least < WAIT_SHARE:
        return None
    figures = (
        f"even the busiest worker spends {percent(least, 0)} of its time waiting for the others'"
        " gradients"
    )
    advice = (
        "More samples per worker (a larger batch, or accumulation), or fewer workers; a timeline"
        " shows the rest."
    )
    return Judgement("waiting", "hint", "Much time goes into exchanging gradients", figures, advice)


RULES: tuple[Rule, ...] = (
    loss_spikes,
    input_bound,
    straggler,
    waiting,
)


def all_well(record: RunRecord, errors: Compared) -> Judgement:
    """What to say when no rule has anything to say."""
    parts = [
        f"{name} error {percent(each.error)}"
        for name, each in (("training", errors.train), ("validation", errors.validation))
        if each is not None
    ]
    if found := split(record):
        share = max(found.share(rank, "input") for rank in range(len(found.ranks)))
        parts.append(f"at most {percent(share)} of a worker's time is waiting for input")
    return Judgement(
        "all_well",
        "good",
        "Nothing stands out",
        ", ".join(parts) or "the record says too little to judge",
    )


def _spikes(losses: Sequence[float]) -> list[int]:
    """Where the loss jumped; the lines after a jump that stays up are not counted again."""
    found: list[int] = []
    for i in range(SPIKE_WINDOW // 2, len(losses)):
        usual = median(losses[max(0, i - SPIKE_WINDOW) : i])
        is_high = (
            losses[i] > SPIKE_FACTOR * usual and losses[i] - usual > SPIKE_OF_FIRST * losses[0]
        )
        if is_high and (not found or i - found[-1] > 1):
            found.append(i)
    return found


def _numbers(lines: Sequence[Fields], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def _at(record: RunRecord, line: Fields) -> str:
    size = samples_per_epoch(record)
    return (
        f"in epoch {figure(line['samples'] / size)}"
        if size
        else f"at sample {line['samples']:,.0f}"
    )


def _progress(record: RunRecord) -> str:
    lines = steps(record)
    if not lines:
        return "no step yet"
    size, config = samples_per_epoch(record), record.start.get("config")
    epochs = number(config, "epochs") if isinstance(config, dict) else None
    if size is None:
        return f"{lines[-1]['samples']:,.0f} samples"
    of = f" of {epochs:.0f}" if epochs else ""
    return f"{figure(lines[-1]['samples'] / size)}{of} epochs"


def _host(record: RunRecord, rank: int) -> str:
    world = record.starts[-1].get("world")
    hosts = world.get("hosts") if isinstance(world, dict) else None
    hosts = [str(host) for host in hosts] if isinstance(hosts, list) else []
    return f" on {hosts[rank]}" if len(set(hosts)) > 1 and rank < len(hosts) else ""
