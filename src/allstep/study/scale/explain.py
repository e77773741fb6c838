"""The loss of a number of workers in sentences, the largest part first.

Limits and advice are those of `allstep report` (`recorded.split`).
"""

from collections.abc import Callable, Mapping

from allstep.console.quantities import milliseconds
from allstep.study.recorded.split import INPUT_SHARE, WAIT_SHARE
from allstep.study.scale.parts import MeasuredStep

_WORTH = 0.01
"""Fraction of a step from which a part is explained."""


def explain(workers: int, step: MeasuredStep, loss: Mapping[str, float]) -> str:
    """Return a paragraph on what `workers` workers lose in a step, and what to change."""
    total = sum(loss.values())
    if total < _WORTH * step.seconds:
        return (
            f"**{workers} workers** lose nothing: a step takes {milliseconds(step.seconds)}, and"
            f" ideally {milliseconds(step.seconds - total)}."
        )
    found = sorted(loss.items(), key=lambda item: -item[1])
    listed = [
        f"- {milliseconds(value)} ({value / step.seconds:.0%}): {_TEXTS[name](step)}"
        for name, value in found
        if value >= _WORTH * step.seconds
    ]
    gained = sum(value for value in loss.values() if value < 0)
    if gained < -_WORTH * step.seconds:
        listed.append(f"- {milliseconds(-gained)} less than ideal in the other parts")
    lost = f"{milliseconds(total)} of a step of {milliseconds(step.seconds)}"
    head = f"**{workers} workers** lose {lost} ({total / step.seconds:.0%}):"
    return "\n".join([head, "", *listed])


def _input(step: MeasuredStep) -> str:
    share = step.parts["input"] / step.seconds
    advice = (
        "; pack the dataset (`allstep data pack`), or use a faster disk, more cores, fewer"
        " augmentations"
        if share >= INPUT_SHARE
        else ""
    )
    return f"input: a worker waits {share:.0%} of its time for data{advice}"


def _compute(step: MeasuredStep) -> str:
    return (
        f"slower compute: forward and backward of a worker's share take"
        f" {milliseconds(step.parts['compute'])}, more than its part of the work; the workers share"
        " cores, caches and the memory bus, and a small share still has the fixed costs of a step"
    )


def _imbalance(step: MeasuredStep) -> str:
    if step.late is None:
        return (
            "imbalance: every step waits for its slowest worker; no single worker is slow, which is"
            " jitter"
        )
    return (
        f"imbalance: worker {step.late} works {step.lateness:.2f} times as long as the others,"
        " which wait for it; check its host for other processes, clock rate and disk, or give it"
        " less with shares=speed"
    )


def _exposed(step: MeasuredStep) -> str:
    share = step.parts["exposed"] / step.seconds
    advice = (
        "; use more samples per worker (a larger batch, or accumulation), or a faster link"
        if share >= WAIT_SHARE
        else ""
    )
    return (
        "exposed communication: even the busiest worker waits for the sum of the gradients"
        f" {share:.0%} of its time{advice}"
    )


def _update(step: MeasuredStep) -> str:
    return (
        f"update: it takes {milliseconds(step.parts['update'])}, however many workers there are,"
        " unless they share weights (share_weights)"
    )


def _rest(step: MeasuredStep) -> str:
    return "between steps: records and other work outside of the four phases"


_TEXTS: Mapping[str, Callable[[MeasuredStep], str]] = {
    "input": _input,
    "compute": _compute,
    "imbalance": _imbalance,
    "exposed": _exposed,
    "update": _update,
    "rest": _rest,
}
