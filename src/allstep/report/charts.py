"""The charts of the page: their curves and axes, which all runs share."""

from collections.abc import Callable, Sequence

from allstep.report.curves import Chart, Curve
from allstep.report.run import Run
from allstep.study.recorded.series import (
    Series,
    over_epochs,
    over_seconds,
    samples_per_epoch,
    smoothed,
    steps,
    thinned,
    throughput,
    validations,
    whole,
    world_changes,
)
from allstep.study.recorded.split import lateness_over_seconds

# ratio of highest to lowest loss above which the axis is logarithmic
_LOG_FROM = 30.0
# Vertical lines of one run; more would hide the curve.
_MAX_MARKS = 100
_EXTRA = (
    ("grad_norm", "Gradient norm", "Norm of the gradient of a step."),
    (
        "noise_scale",
        "Noise scale",
        "Batch beyond which a larger one gains little (the simple noise scale).",
    ),
)
"""Charts that are drawn if step lines have the key: key, title and description."""


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return all charts of the page, in its order."""
    made = [loss(runs), accuracy(runs), learning_rate(runs), speed(runs), lateness(runs)]
    made += [_extra(runs, *each) for each in _EXTRA]
    if any(_grows(run) for run in runs):
        made.insert(3, batch(runs))
    if len(runs) > 1:
        made.insert(2, accuracy_by_time(runs))
    return made


def loss(runs: Sequence[Run]) -> Chart:
    """Return the chart of training and validation loss."""
    curves = _both(runs, "loss")
    values = [value for curve in curves for value in curve.series.y]
    falls_far = bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    scale = " Logarithmic scale." if falls_far else ""
    about = (
        "Loss of training steps (thin, in training mode) and of the validation split (with"
        f" dots).{scale}"
    )
    return Chart("Loss", about, _x_name(runs), curves, lowest=0.0, log=falls_far)


def accuracy(runs: Sequence[Run]) -> Chart:
    """Return the chart of training and validation accuracy; its axis omits the low first steps."""
    curves = _both(runs, "accuracy")
    about = (
        "Accuracy of training steps (thin, in training mode) and of the validation split (with"
        " dots)."
    )
    return Chart(
        "Accuracy", about, _x_name(runs), curves, "percent", _floor(curves), _ceiling(curves)
    )


def accuracy_by_time(runs: Sequence[Run]) -> Chart:
    """Return the chart of validation accuracy over the time of the run."""
    curves = tuple(
        Curve(run.name, over_seconds(run.record, validations(run.record), "accuracy"), number)
        for number, run in enumerate(runs)
    )
    about = "Validation accuracy over the time of the run: further left is faster."
    return Chart(
        "Accuracy by time", about, "time", curves, "percent", _floor(curves), _ceiling(curves)
    )


def learning_rate(runs: Sequence[Run]) -> Chart:
    """Return the chart of the learning rate that the steps used."""
    about = "The learning rate of the steps: warm-up, peak and decay."
    curves = _each(runs, lambda run: over_epochs(run.record, steps(run.record), "lr"))
    return Chart("Learning rate", about, _x_name(runs), curves, lowest=0.0)


def batch(runs: Sequence[Run]) -> Chart:
    """Return the chart of the batch, for runs whose batch grows."""
    about = "Samples of an update, over all workers."
    curves = _each(runs, lambda run: over_epochs(run.record, steps(run.record), "batch"))
    return Chart("Batch", about, _x_name(runs), curves, lowest=0.0)


def _grows(run: Run) -> bool:
    return len(set(over_epochs(run.record, steps(run.record), "batch").y)) > 1


def speed(runs: Sequence[Run]) -> Chart:
    """Return the chart of the throughput over the time of the run."""
    about = "Images per second over the run, all workers together, without evaluations."
    curves = _each(runs, lambda run: throughput(run.record))
    marks = tuple(mark for run in runs for mark in world_changes(run.record)[:_MAX_MARKS])
    if marks:
        about += " Dashed lines: workers were lost, joined or left."
    return Chart("Throughput (images/s)", about, "time", curves, lowest=0.0, marks=marks)


def lateness(runs: Sequence[Run]) -> Chart:
    """Return the chart of the slowest worker's own work relative to the mean."""
    about = "Own work of the slowest worker divided by the mean of all: 1 is perfect balance."
    curves = _each(runs, lambda run: smoothed(lateness_over_seconds(run.record), 40))
    return Chart("Slowest worker", about, "time", curves, lowest=1.0)


def _extra(runs: Sequence[Run], key: str, title: str, about: str) -> Chart:
    curves = _each(runs, lambda run: over_epochs(run.record, steps(run.record), key))
    values = [value for curve in curves for value in curve.series.y]
    falls_far = bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    return Chart(title, about, _x_name(runs), curves, lowest=0.0, log=falls_far)


def _both(runs: Sequence[Run], key: str) -> tuple[Curve, ...]:
    """Return the curves of steps, then those of evaluations, which are drawn on top."""

    def name(run: Run, part: str) -> str:
        return f"{run.name}, {part}" if len(runs) > 1 else part

    thin = [
        Curve(
            name(run, "training"),
            over_epochs(run.record, whole(steps(run.record)), key),
            number,
            "thin",
        )
        for number, run in enumerate(runs)
    ]
    strong = [
        Curve(
            name(run, "validation"), over_epochs(run.record, validations(run.record), key), number
        )
        for number, run in enumerate(runs)
    ]
    return (*thin, *strong)


def _each(runs: Sequence[Run], series: Callable[[Run], Series]) -> tuple[Curve, ...]:
    return tuple(
        Curve(run.name, thinned(series(run)), number, "line") for number, run in enumerate(runs)
    )


def _x_name(runs: Sequence[Run]) -> str:
    return "epoch" if all(samples_per_epoch(run.record) for run in runs) else "samples"


def _floor(curves: Sequence[Curve]) -> float | None:
    """Return the start of the y axis: a bit below the later three quarters of the evaluations.

    The first steps are below it.
    """
    later = [
        value
        for curve in curves
        if curve.style == "strong"
        for value in curve.series.y[len(curve.series) // 4 :]
    ]
    if not later:
        return None
    worst = 1 - min(later)
    return max(0.0, 1 - 1.6 * worst - 0.01)


def _ceiling(curves: Sequence[Curve]) -> float | None:
    """Return the end of the y axis: a bit above the best value, or 100% if that is near."""
    best = max((value for curve in curves for value in curve.series.y), default=None)
    if best is None:
        return None
    return 1.0 if best > 0.9 else min(1.0, best * 1.05)
