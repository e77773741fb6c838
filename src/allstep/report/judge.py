"""What the curves of a run mean, in words, each with the figures that led to it.

A rule is a pure function from a record to a judgement, or to None when it has nothing to say. They look at

    errors      training error of the last epoch beside validation error: which of the two is the larger part of the problem?
    curves      spikes of the loss, a validation loss that turned, a run that was cut off while it still improved
    times       input, the slowest worker, waiting for gradients

Training error is what the steps saw (augmented pictures, dropout, weights on the move), so it errs on the high side. A difference that
the size of the validation set cannot show (two standard errors) is not spoken of.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal

from allstep.report.ending import divergence, is_finished, last_word, noise_advice, patience, pause
from allstep.report.series import counts, number, samples_per_epoch, steps, validations, whole
from allstep.report.split import slowest_by_line, split
from allstep.report.wording import figure, percent, seconds
from allstep.runlog import Fields, RunRecord

HIGH_TRAINING_ERROR = 0.10
LEAST_GAP = 0.02
"""Between training and validation error."""
GAP_FACTOR = 1.5
"""Validation error over training error."""
TURNED = 1.10
"""Last validation loss over the lowest."""
SPIKE_FACTOR, SPIKE_OF_FIRST, SPIKE_WINDOW = 2.0, 0.1, 10
"""A loss of twice what the ten lines before had, higher by a tenth of the loss at the start."""
IMPROVING = 0.05
"""Part of the validation loss that the last quarter of the run took away."""
INPUT_SHARE = 0.15
LATENESS, LATE_OFTEN = 1.15, 0.6
"""Own work of the slowest over the median of the others, and how often it must be the slowest."""
WAIT_SHARE = 0.25


@dataclass(frozen=True)
class Judgement:
    """One sentence on what is seen, the figures, and what to do."""

    rule: str
    severity: Literal["problem", "hint", "good"]
    title: str
    figures: str
    advice: str = ""


Rule = Callable[[RunRecord], Judgement | None]


def judge(record: RunRecord, now: float) -> list[Judgement]:
    """All that can be said about a run at the time `now`; when no rule finds fault, that."""
    found = [unfinished(record, now), *(rule(record) for rule in RULES)]
    said = [judgement for judgement in found if judgement is not None] or [all_well(record)]
    return [*said, *batch_by_noise(record)]


def unfinished(record: RunRecord, now: float) -> Judgement | None:
    """A run without an end: diverged, told to stop, still going, or killed."""
    if is_finished(record):
        return None
    if event := divergence(record):
        return _diverged(record, event)
    if event := pause(record):
        advice = "That is no failure: `allstep train --resume auto` goes on from there."
        return Judgement("unfinished", "hint", "The run was told to stop", str(event.get("text")), advice)
    silence = max(0.0, now - last_word(record))
    place = f"{_progress(record)}; last word {seconds(silence)} ago"
    if silence < patience(record):
        return Judgement("unfinished", "hint", "The run is still going", place, "Ask for the report again later.")
    told = f"; its last event: {record.events[-1].get('text')}" if record.events else ""
    advice = "It was stopped or killed, or it hangs. `allstep train --resume auto` goes on from its last checkpoint."
    return Judgement("unfinished", "problem", "The run did not end", place + told, advice)


def _diverged(record: RunRecord, event: Fields) -> Judgement:
    """What the run itself said when it gave up."""
    rate, place = number(event, "lr"), None if number(event, "samples") is None else _at(record, event)
    parts = [str(event.get("text")), place, None if rate is None else f"at a rate of {figure(rate)}"]
    figures = ", ".join(part for part in parts if part)
    advice = (
        "A lower rate, a longer warm-up, `optimizer.clip=1`; the output of the run named the samples of that step. "
        "`--resume auto` would go on from the last good checkpoint, into the same step."
    )
    return Judgement("unfinished", "problem", "The run diverged", figures, advice)


def batch_by_noise(record: RunRecord) -> list[Judgement]:
    """What the run said about its noise scale; beside the rules, since it finds no fault."""
    event = noise_advice(record)
    if event is None:
        return []
    figures = str(event.get("text")).rstrip(".")
    return [Judgement("batch_by_noise", "good", "How large the batch could be", figures)]


def high_training_error(record: RunRecord) -> Judgement | None:
    """Most of the error is there in training already."""
    error, gap = training_error(record), _gap(record)
    if error is None or error < HIGH_TRAINING_ERROR or (gap is not None and gap > error):
        return None
    advice = (
        "It has not learnt the training set yet, and it still improves: train longer first, then try a bigger model."
        if still_improving(record)
        else "It cannot even fit what it trains on: a bigger model, longer training, a better rate, less regularisation."
    )
    beside = "" if gap is None else f", validation {_signed(gap)} points from it"
    figures = f"training error {percent(error)} in the last epoch{beside}"
    return Judgement("high_training_error", "problem", "High training error", figures, advice)


def overfitting(record: RunRecord) -> Judgement | None:
    """Low training but high validation error."""
    error, gap = training_error(record), _gap(record)
    if error is None or gap is None or high_training_error(record):
        return None
    if gap < max(LEAST_GAP, 2 * _standard_error(record)) or error + gap < GAP_FACTOR * error:
        return None
    figures = f"training error {percent(error)}, validation error {percent(error + gap)}: {_signed(gap)} points"
    advice = "In this order: more data, augmentation, dropout, weight decay, early stopping; or a smaller model."
    title = "Low training error, high validation error"
    return Judgement("overfitting", "problem" if error + gap > HIGH_TRAINING_ERROR else "hint", title, figures, advice)


def validation_turned(record: RunRecord) -> Judgement | None:
    """The validation loss was lower before."""
    losses = _numbers(validations(record), "loss")
    if len(losses) < 4:
        return None
    best = min(range(len(losses)), key=losses.__getitem__)
    if best >= len(losses) * 3 // 4 or losses[-1] < TURNED * losses[best]:
        return None
    figures = (
        f"validation loss was lowest, {figure(losses[best])}, at evaluation {best + 1} of {len(losses)} "
        f"and is {figure(losses[-1])} now"
    )
    advice = "Stop earlier, or keep the best weights; the remedies for a high validation error apply."
    severity: Literal["problem", "hint"] = "problem" if _accuracy_fell(record) else "hint"
    return Judgement("validation_turned", severity, "Validation got worse again", figures, advice)


def _accuracy_fell(record: RunRecord) -> bool:
    """Below its best by more than the size of the validation set can make."""
    accuracies = _numbers(validations(record), "accuracy")
    return bool(accuracies) and max(accuracies) - accuracies[-1] > 2 * _standard_error(record)


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
        f"{'once' if len(spikes) == 1 else f'{len(spikes)} times, the worst'} {_at(record, lines[worst])}: "
        f"{figure(usual)} to {figure(lines[worst]['loss'])}{rate}"
    )
    advice = "A lower rate, a longer warm-up, gradient clipping; look at the samples of that step."
    return Judgement("loss_spikes", "problem", "The training loss spiked", figures, advice)


def still_improving(record: RunRecord) -> Judgement | None:
    """The validation loss was still falling when the run ended."""
    losses = _numbers(validations(record), "loss")
    if len(losses) < 4 or not is_finished(record):
        return None
    before = losses[len(losses) * 3 // 4 - 1]
    is_best = min(losses) in losses[-2:]
    if not is_best or losses[-1] > (1 - IMPROVING) * before:
        return None
    fall = 1 - losses[-1] / before
    figures = (
        f"validation loss fell from {figure(before)} to {figure(losses[-1])} ({percent(fall, 0)}) in the last quarter"
    )
    return Judgement("still_improving", "hint", "Still improving at the end", figures, "More epochs should give more.")


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
    figures = f"{percent(share, 0)} of worker {rank}'s time is waiting for input (mean of all {percent(usual, 0)})"
    advice = (
        "Pack the set (`allstep data pack`, `--max-side`, `--raw`), a faster disk, more cores, fewer augmentations."
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
        f"worker {rank}{_host(record, rank)} works {found.lateness:.3g} times as long as the others, "
        f"and was the slowest in {percent(often, 0)} of {len(slowest)} intervals"
    )
    advice = "Look what else runs there, at its clock and its disk; `allstep doctor` compares the hosts."
    return Judgement("straggler", "problem", "One worker holds up the others", figures, advice)


def waiting(record: RunRecord) -> Judgement | None:
    """Even the worker that waits least waits long: gradients take their time."""
    found = split(record)
    if found is None or len(found.ranks) < 2:
        return None
    least = min(found.share(rank, "wait") for rank in range(len(found.ranks)))
    if least < WAIT_SHARE:
        return None
    figures = f"even the busiest worker spends {percent(least, 0)} of its time waiting for the others' gradients"
    advice = "More samples per worker (a larger batch, or accumulation), or fewer workers; a timeline shows the rest."
    return Judgement("waiting", "hint", "Much time goes into exchanging gradients", figures, advice)


RULES: tuple[Rule, ...] = (
    high_training_error,
    overfitting,
    validation_turned,
    loss_spikes,
    still_improving,
    input_bound,
    straggler,
    waiting,
)


def all_well(record: RunRecord) -> Judgement:
    """What to say when no rule has anything to say."""
    train, validation = training_error(record), validation_error(record)
    parts = [
        f"{name} error {percent(error)}"
        for name, error in (("training", train), ("validation", validation))
        if error is not None
    ]
    if found := split(record):
        share = max(found.share(rank, "input") for rank in range(len(found.ranks)))
        parts.append(f"at most {percent(share)} of a worker's time is waiting for input")
    return Judgement(
        "all_well", "good", "Nothing stands out", ", ".join(parts) or "the record says too little to judge"
    )


def training_error(record: RunRecord) -> float | None:
    """Share of wrong samples over the last epoch of steps."""
    lines = steps(record)
    if not lines:
        return None
    since = lines[-1]["samples"] - (samples_per_epoch(record) or lines[-1]["samples"])
    last = [
        (size, accuracy)
        for line, size in zip(lines, counts(lines), strict=True)
        if line["samples"] > since and (accuracy := number(line, "accuracy")) is not None
    ]
    total = sum(size for size, _ in last)
    return 1 - sum(size * accuracy for size, accuracy in last) / total if total else None


def validation_error(record: RunRecord) -> float | None:
    """Share of wrong samples in the last validation."""
    accuracies = _numbers(validations(record), "accuracy")
    return 1 - accuracies[-1] if accuracies else None


def _gap(record: RunRecord) -> float | None:
    train, validation = training_error(record), validation_error(record)
    return None if train is None or validation is None else validation - train


def _standard_error(record: RunRecord) -> float:
    error, count = validation_error(record), number(validations(record)[-1], "count")
    return math.sqrt(max(0.0, error * (1 - error)) / count) if error is not None and count and count > 0 else 0.0


def _spikes(losses: Sequence[float]) -> list[int]:
    """Where the loss jumped; the lines after a jump that stays up are not counted again."""
    found: list[int] = []
    for i in range(SPIKE_WINDOW // 2, len(losses)):
        usual = median(losses[max(0, i - SPIKE_WINDOW) : i])
        is_high = losses[i] > SPIKE_FACTOR * usual and losses[i] - usual > SPIKE_OF_FIRST * losses[0]
        if is_high and (not found or i - found[-1] > 1):
            found.append(i)
    return found


def _numbers(lines: Sequence[Fields], key: str) -> list[float]:
    return [value for line in lines if (value := number(line, key)) is not None]


def _signed(gap: float) -> str:
    return f"{100 * gap:+.1f}"


def _at(record: RunRecord, line: Fields) -> str:
    size = samples_per_epoch(record)
    return f"in epoch {figure(line['samples'] / size)}" if size else f"at sample {line['samples']:,.0f}"


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
