"""Which curves the page shows, and on which axes: every run on the same ones."""

from collections.abc import Callable, Sequence

from allstep.report.curves import Chart, Curve
from allstep.report.run import Run
from allstep.report.series import (
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
)
from allstep.report.split import lateness_over_seconds

_LOG_FROM = 30.0  # a loss that falls further than this is drawn on a logarithmic axis
_EXTRA = (
    ("grad_norm", "Gradient norm", "Norm of the gradient of a step."),
    (
        "noise_scale",
        "Noise scale",
        "Samples per batch beyond which a larger one gains little (the simple noise scale).",
    ),
)
"""Curves that are drawn where step lines have the key."""


def charts(runs: Sequence[Run]) -> list[Chart]:
    """In the order of the page."""
    made = [loss(runs), accuracy(runs), learning_rate(runs), speed(runs), lateness(runs)]
    made += [_extra(runs, *words) for words in _EXTRA]
    if any(_grows(run) for run in runs):
        made.insert(3, batch(runs))
    if len(runs) > 1:
        made.insert(2, accuracy_by_time(runs))
    return made


def loss(runs: Sequence[Run]) -> Chart:
    """Training and validation."""
    curves = _both(runs, "loss")
    values = [value for curve in curves for value in curve.series.y]
    falls_far = bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    scale = " Logarithmic scale." if falls_far else ""
    about = (
        "Loss in training (thin, as the steps saw it) and on the validation part (with"
        f" dots).{scale}"
    )
    return Chart("Loss", about, _x_name(runs), curves, lowest=0.0, log=falls_far)


def accuracy(runs: Sequence[Run]) -> Chart:
    """Training and validation, without the depths of the first steps."""
    curves = _both(runs, "accuracy")
    about = (
        "Accuracy in training (thin, as the steps saw it) and on the validation part (with dots)."
    )
    return Chart(
        "Accuracy", about, _x_name(runs), curves, "percent", _floor(curves), _ceiling(curves)
    )


def accuracy_by_time(runs: Sequence[Run]) -> Chart:
    """Who is there first."""
    curves = tuple(
        Curve(run.name, over_seconds(run.record, validations(run.record), "accuracy"), number)
        for number, run in enumerate(runs)
    )
    about = "Validation accuracy by the time a run took: further left is faster."
    return Chart(
        "Accuracy by time", about, "time", curves, "percent", _floor(curves), _ceiling(curves)
    )


def learning_rate(runs: Sequence[Run]) -> Chart:
    """As the steps used it."""
    about = "The learning rate of the steps: warm-up, peak and decay."
    curves = _each(runs, lambda run: over_epochs(run.record, steps(run.record), "lr"))
    return Chart("Learning rate", about, _x_name(runs), curves, lowest=0.0)


def batch(runs: Sequence[Run]) -> Chart:
    """Where one grows."""
    about = "Samples of an update, over all workers."
    curves = _each(runs, lambda run: over_epochs(run.record, steps(run.record), "batch"))
    return Chart("Batch", about, _x_name(runs), curves, lowest=0.0)


def _grows(run: Run) -> bool:
    return len(set(over_epochs(run.record, steps(run.record), "batch").y)) > 1


def speed(runs: Sequence[Run]) -> Chart:
    """Over the time of the run."""
    about = "Images per second over the run, all workers together, without evaluations."
    curves = _each(runs, lambda run: throughput(run.record))
    return Chart("Throughput (images/s)", about, "time", curves, lowest=0.0)


def lateness(runs: Sequence[Run]) -> Chart:
    """How far the slowest worker was behind."""
    about = "Own work of the slowest worker over the mean of all: 1 is perfect balance."
    curves = _each(runs, lambda run: smoothed(lateness_over_seconds(run.record), 40))
    return Chart("Slowest worker", about, "time", curves, lowest=1.0)


def _extra(runs: Sequence[Run], key: str, title: str, about: str) -> Chart:
    curves = _each(runs, lambda run: over_epochs(run.record, steps(run.record), key))
    values = [value for curve in curves for value in curve.series.y]
    falls_far = bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_FROM
    return Chart(title, about, _x_name(runs), curves, lowest=0.0, log=falls_far)


def _both(runs: Sequence[Run], key: str) -> tuple[Curve, ...]:
    """The steps' curves first, so that evaluations lie on top."""

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
    """An axis that begins where the later three quarters of the evaluations are; the first steps
    are below it."""
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
    """Some room above the best; the whole up to 100% when it is near."""
    best = max((value for curve in curves for value in curve.series.y), default=None)
    if best is None:
        return None
    return 1.0 if best > 0.9 else min(1.0, best * 1.05)
