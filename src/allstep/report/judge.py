"""Rules that explain what the curves of a run mean, each with the figures behind it.

A rule is a pure function from a run record to a judgement, or to None if it does not apply. The
rules use

    fit         training and validation error, and whether the run was long enough (`fit`)
    curves      spikes of the loss, a validation loss that rose again or still fell at the end
    times       input, the slowest worker, waiting for gradients
    parties     what asynchronous steps gain, and what their bound costs (`sync_advice`)
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
    pause,
    silence_timeout,
)
from allstep.report.judgement import Judgement, Rule
from allstep.report.run import Run
from allstep.report.sync.sync_advice import (
    asynchronous,
    bound_waits,
    in_place_of_waiting,
    shares_of,
)
from allstep.runlog import Fields, RunRecord, number
from allstep.study.calibration.gain_of_run import gain_of_run
from allstep.study.recorded.series import samples_per_epoch, steps, whole
from allstep.study.recorded.split import INPUT_SHARE, WAIT_SHARE, late_worker, split
from allstep.study.recorded.worlds import longest

SPIKE_FACTOR, SPIKE_OF_FIRST, SPIKE_WINDOW = 2.0, 0.1, 10
"""A spike is twice the median of the ten lines before, and higher by a tenth of the first loss."""


def judge(record: RunRecord, now: float) -> list[Judgement]:
    """Return the judgements on a run at the time `now` (seconds since the epoch).

    If no rule applies, there is one judgement that no problem was found."""
    seen = fit.look(record)
    found = [
        unfinished(record, now),
        *(rule(seen) for rule in fit.RULES),
        *(rule(record) for rule in RULES),
    ]
    judgements = [each for each in found if each is not None]
    return [*(judgements or [all_well(record, seen.errors)]), *batch_by_noise(record)]


def one_change(run: Run) -> list[Judgement]:
    """Return what one change would gain, if the run has a calibration; not in RULES for that."""
    found = gain_of_run(run.folder, run.config, run.record)
    if found is None:
        return []
    return [Judgement("one_change", "hint", "What one change would gain", *found)]


def unfinished(record: RunRecord, now: float) -> Judgement | None:
    """Judge a run without an end: it diverged, was asked to stop, is still going, or was killed."""
    if is_finished(record):
        return None
    if event := divergence(record):
        return _diverged(record, event)
    if event := pause(record):
        advice = "This is not a failure: `allstep train --resume auto` resumes the run."
        return Judgement(
            "unfinished", "hint", "The run was asked to stop", str(event.get("text")), advice
        )
    silence = max(0.0, now - last_time(record))
    progress = f"{_progress(record)}; last line {seconds(silence)} ago"
    if silence < silence_timeout(record):
        advice = "Make the report again later."
        return Judgement("unfinished", "hint", "The run is still going", progress, advice)
    last_event = f"; its last event: {record.events[-1].get('text')}" if record.events else ""
    advice = (
        "It was stopped or killed, or it hangs. `allstep train --resume auto` resumes from its last"
        " checkpoint."
    )
    return Judgement("unfinished", "problem", "The run did not end", progress + last_event, advice)


def _diverged(record: RunRecord, event: Fields) -> Judgement:
    """Return the judgement on a run that diverged, from the event that it recorded."""
    lr = number(event, "lr")
    position = None if number(event, "samples") is None else _at(record, event)
    parts = [str(event.get("text")), position, None if lr is None else f"at lr {figure(lr)}"]
    figures = ", ".join(part for part in parts if part)
    advice = (
        "Try a lower learning rate, a longer warm-up, `optimizer.clip=1`; the output of the run"
        " lists the samples of that step. `--resume auto` alone would resume from the last good"
        " checkpoint and repeat the same step."
    )
    return Judgement("unfinished", "problem", "The run diverged", figures, advice)


def batch_by_noise(record: RunRecord) -> list[Judgement]:
    """Return the run's advice on its noise scale; not in RULES, as it is not a problem."""
    event = noise_advice(record)
    if event is None:
        return []
    figures = str(event.get("text")).rstrip(".")
    return [Judgement("batch_by_noise", "good", "How large the batch could be", figures)]


def loss_spikes(record: RunRecord) -> Judgement | None:
    """Judge a run whose training loss spiked."""
    lines = [line for line in whole(steps(record)) if number(line, "loss") is not None]
    spikes = _spikes(_numbers(lines, "loss"))
    if not spikes:
        return None
    worst = max(spikes, key=lambda i: lines[i]["loss"])
    usual = median(_numbers(lines[max(0, worst - SPIKE_WINDOW) : worst], "loss"))
    rate = "" if (lr := number(lines[worst], "lr")) is None else f", at lr {figure(lr)}"
    figures = (
        f"{'once' if len(spikes) == 1 else f'{len(spikes)} times, the worst'}"
        f" {_at(record, lines[worst])}: {figure(usual)} to {figure(lines[worst]['loss'])}{rate}"
    )
    advice = (
        "Try a lower learning rate, a longer warm-up, clipping; check the samples of that step."
    )
    return Judgement("loss_spikes", "problem", "The training loss spiked", figures, advice)


def input_bound(record: RunRecord) -> Judgement | None:
    """Judge a run in which a worker waits for data."""
    found = split(record)
    if found is None:
        return None
    ranks, rank = range(len(found.ranks)), found.hungriest
    share = found.share(rank, "input")
    if share < INPUT_SHARE:
        return None
    usual = mean(found.share(each, "input") for each in ranks)
    figures = (
        f"{percent(share, 0)} of worker {rank}'s time is waiting for input (mean of all"
        f" {percent(usual, 0)})"
    )
    advice = (
        "Pack the dataset (`allstep data pack`, `--max-side`, `--raw`), or use a faster disk, more"
        " cores, fewer augmentations."
    )
    return Judgement("input_bound", "problem", "The run waits for its data", figures, advice)


def straggler(record: RunRecord) -> Judgement | None:
    """Judge a run in which one worker is slower than the others most of the time.

    In an asynchronous run no worker waits for it.
    """
    found, late = split(record), late_worker(record)
    if found is None or late is None or record.syncs:
        return None
    rank, slowest = late.rank, late.lines
    figures = (
        f"worker {rank}{_host(record, rank)} works {found.lateness:.3g} times as long as the"
        f" others, and was the slowest in {percent(late.often, 0)} of {slowest} intervals"
    )
    advice = (
        "Check that host for other processes, clock rate and disk; `allstep doctor` compares hosts."
        f" {in_place_of_waiting(found, shares_of(record.starts[-1].get('config')))}"
    ).strip()
    return Judgement("straggler", "problem", "One worker holds up the others", figures, advice)


def waiting(record: RunRecord) -> Judgement | None:
    """Judge a run in which every worker waits long for gradients."""
    found = split(record)
    if found is None or len(found.ranks) < 2:
        return None
    least = found.least_wait
    if least < WAIT_SHARE:
        return None
    figures = f"even the busiest worker waits {percent(least, 0)} of its time for other gradients"
    advice = (
        "Use more samples per worker (a larger batch, or accumulation), or fewer workers; a"
        " timeline shows the details."
    )
    return Judgement("waiting", "hint", "Much time goes into exchanging gradients", figures, advice)


RULES: tuple[Rule, ...] = (
    loss_spikes,
    input_bound,
    straggler,
    waiting,
    asynchronous,
    bound_waits,
)


def all_well(record: RunRecord, errors: Compared) -> Judgement:
    """Return the judgement on a run to which no rule applies."""
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
        "No problem found",
        ", ".join(parts) or "the record has too few figures to judge",
    )


def _spikes(losses: Sequence[float]) -> list[int]:
    """Return the indices at which the loss spiked, once for each spike of several lines."""
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
    hosts = longest(record).hosts
    return f" on {hosts[rank]}" if len(set(hosts)) > 1 and rank < len(hosts) else ""
