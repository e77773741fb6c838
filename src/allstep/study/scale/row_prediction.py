"""What the planner predicts for a number of workers, from the rows of the table before it.

The rows are a calibration (`plan.calibration`): shares of the batch with the own work of a usual
worker, and whole steps of several workers. Where a share was measured at several sizes, the line
through them also has the fixed part of a step. A run record has no ready time for each gradient, so
the gradients are spread evenly over the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from allstep.costs.speed import Speed
from allstep.plan.calibration import Calibration, StepTimes
from allstep.plan.knowledge import Knowledge, measured_parts
from allstep.plan.levels import ERRORS, NAMES
from allstep.plan.prediction import Question, fitted, predict
from allstep.study.scale.parts import MeasuredStep

_FORWARD = 1 / 3
_GRADIENTS = 10
_SHORTEST = 1e-9
UNKNOWN_LINK = Speed(50e-6, 12.5e9, inf)
"""The link between hosts before one was measured or named: a fast one, so a prediction is an upper
limit."""


@dataclass(frozen=True)
class KnownRow:
    """A row of the table: a number of workers and their mean step."""

    workers: int
    hosts: int
    step: MeasuredStep

    @property
    def share(self) -> float:
        """Samples of a worker in a step."""
        return self.step.samples / self.workers


@dataclass(frozen=True)
class Setup:
    """What does not depend on the number of workers."""

    nbytes: float
    """Bytes of all gradients."""
    num_train: int
    per_host: int
    link: Speed | None
    """Between hosts; None: unknown."""


@dataclass(frozen=True)
class RowForecast:
    """The predicted speed of a row, and how much was known."""

    samples_per_second: float
    level: int

    @property
    def known(self) -> str:
        """What was known."""
        return NAMES[self.level]

    @property
    def expected_error(self) -> str:
        """The error to expect."""
        return ERRORS[self.level]


def forecast(
    before: Sequence[KnownRow], setup: Setup, workers: int, samples: int
) -> RowForecast | None:
    """Return the prediction for `workers` workers and `samples` a step; None without rows before.

    The rows are in the order of the table, the first with the fewest workers.
    """
    if not before:
        return None
    calibration = _calibration(before, setup)
    known = measured_parts(calibration)
    for row in before:
        if row.workers > 1:
            # A worker that was late will be late.
            known = replace(known, slow=row.step.lateness, slowest=row.step.late)
            asked = _question(setup, known, row.step.samples)
            known = fitted(calibration, known, asked, row.workers, row.step.seconds)
    found = predict(calibration, known, _question(setup, known, samples), workers)
    return RowForecast(found.samples_per_second, known.level)


def _question(setup: Setup, known: Knowledge, samples: int) -> Question:
    """Return the question for a step of `samples` samples; the link is fitted once it was used."""
    link = None if known.link is not None else setup.link or UNKNOWN_LINK
    return Question(setup.per_host, batch=samples, link=link)


def _calibration(before: Sequence[KnownRow], setup: Setup) -> Calibration:
    """Return the rows as a calibration: of rows with one share, the last counts."""
    by_share = {round(row.share): row.step for row in before}
    steps = tuple(_times(share, by_share[share]) for share in sorted(by_share))
    return Calibration((setup.nbytes / _GRADIENTS,) * _GRADIENTS, steps, setup.num_train)


def _times(share: int, step: MeasuredStep) -> StepTimes:
    """Return the own work of a usual worker, with the gradients ready at even intervals."""
    compute = max(_SHORTEST, step.parts["compute"])
    forward = _FORWARD * compute
    backward = compute - forward
    ready = tuple(forward + backward * (1 - place / _GRADIENTS) for place in range(_GRADIENTS))
    # Waiting for input is time of its own here, as that of an update is: the pipeline hid the rest.
    update = step.parts["update"] + step.parts["input"] + max(0.0, step.parts["rest"])
    return StepTimes(max(1, share), forward, backward, ready, update, jitter=step.jitter)
