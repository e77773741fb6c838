"""What the record of a run has of a calibration (`allstep plan --like RUN`).

A run shows how long a worker computes, waits and updates, how much workers differ, and how many of
them were on a host. It does not show when each gradient was ready, nor its bytes: these come from a
calibration of the same model if there is one. Without one the gradients are taken as equal slices
of the model, ready at even times, and the fixed part of a step as 0, so small shares come out too
fast.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from allstep import runlog
from allstep.costs.speed import Speed
from allstep.errors import ConfigError, DataError
from allstep.plan.calibration import Calibration, StepTimes, profile_at
from allstep.plan.knowledge import Knowledge, measured_parts
from allstep.plan.prediction import Question, fitted, knowledge, predict
from allstep.runlog import Fields, RunRecord, kept, number

_PHASES = ("input", "compute", "wait", "update")
_SLICES = 16
_NOMINAL = Speed(50e-6, 12.5e9, inf)


class RunTimes:
    """The times of a run: medians of its lines, per step."""

    def __init__(self, record: RunRecord, folder: Path) -> None:
        start = record.starts[-1]
        self.config = _section(start, "config")
        self.world = _section(start, "world")
        self.size = int(number(self.world, "size") or 1)
        hosts = self.world.get("hosts")
        names = hosts if isinstance(hosts, list) and hosts else ["this"]
        self.num_hosts = len(set(map(str, names)))
        self.num_train = int(number(_section(start, "data"), "train") or 0)
        self.nbytes = number(start, "bytes") or 0.0
        rows = [found for each in kept(record.steps) if (found := _phases(each, self.size))]
        # The first line includes what a run does once.
        rows = rows[1:] or rows
        self.batch = int(number(self.config, "batch") or 0)
        log_every = int(number(self.config, "log_every") or 0)
        if not rows or not self.batch or not log_every or not self.num_train or not self.nbytes:
            raise DataError(
                f"{folder}: expected a run record with step lines of all workers, found too few;"
                " give another run"
            )
        steps = [each["seconds"] * each["images_per_second"] / self.batch for each in rows]
        per_step = [
            {phase: [value / max(count, 1e-9) for value in each[phase]] for phase in _PHASES}
            for each, count in zip(rows, steps, strict=True)
        ]
        self.by_rank = {
            phase: [median(each[phase][rank] for each in per_step) for rank in range(self.size)]
            for phase in _PHASES
        }
        self.seconds = median(
            each["seconds"] / max(count, 1e-9) for each, count in zip(rows, steps, strict=True)
        )
        computed = [fmean(each["compute"]) for each in per_step]
        # A line is the mean over several steps, which differ more than their means do.
        spread = pstdev(computed) / (fmean(computed) or inf) if len(computed) > 2 else 0.0
        self.jitter = min(0.5, spread * log_every**0.5)

    @property
    def share(self) -> int:
        """Samples of a worker's share."""
        return max(1, round(self.batch / self.size))

    @property
    def slow(self) -> tuple[float, int | None]:
        """How much longer the slowest worker computes than the others, and its rank."""
        times = self.by_rank["compute"]
        rank = max(range(self.size), key=times.__getitem__)
        others = [each for place, each in enumerate(times) if place != rank]
        factor = times[rank] / median(others) if others and median(others) > 0 else 1.0
        return (factor, rank) if factor >= 1.1 else (1.0, None)

    @property
    def compute(self) -> float:
        """Forward and backward of a usual worker."""
        return float(median(self.by_rank["compute"]))


def calibration_of_run(folder: Path, shape: Calibration | None) -> tuple[Calibration, Knowledge]:
    """Return the calibration that a run shows, and what follows from it.

    shape: a calibration of the same model, for ready times, bytes and the fixed part of a step.
    """
    try:
        record = runlog.read(folder / "run.jsonl")
    except OSError as error:
        raise DataError(
            f"--like {folder}: is not a run folder ({error.strerror or error}); give one of"
            " allstep train"
        ) from error
    if not record.starts:
        raise DataError(f"--like {folder}: the run has not started; give another run")
    times = RunTimes(record, folder)
    if shape is None:
        shape = _alike(times)
    elif abs(sum(shape.nbytes) / times.nbytes - 1) > 0.01:
        raise ConfigError(
            f"--like {folder}: its model has {times.nbytes:.0f} bytes of weights, the calibration"
            f" {sum(shape.nbytes):.0f}; give a calibration of the same model"
        )
    return _fitted_to(times, shape)


def _alike(times: RunTimes) -> Calibration:
    """Return a calibration with equal slices of the model, ready at even times."""
    compute, each = times.compute, times.nbytes / _SLICES
    forward = compute / 3
    ready = tuple(forward + (compute - forward) * (1 - place / _SLICES) for place in range(_SLICES))
    update = median(times.by_rank["update"])
    step = StepTimes(times.share, forward, compute - forward, ready, update, 0.0, times.jitter)
    facts: dict[str, str | int | float] = {
        "batch": times.batch,
        "time": "a run",
        "cpu": str(times.world.get("host", "a host")),
    }
    return Calibration((each,) * _SLICES, (step,), times.num_train, facts=facts)


def _fitted_to(times: RunTimes, shape: Calibration) -> tuple[Calibration, Knowledge]:
    """Return the calibration with the computation of the run, and knowledge that explains it."""
    profile = profile_at(shape, times.share)
    per_host = max(1, ceil(times.size / times.num_hosts))
    known = replace(
        knowledge(shape) if shape.host is not None else measured_parts(shape),
        jitter=times.jitter or shape.jitter,
        slow=times.slow[0],
        slowest=times.slow[1],
    )
    # What the run computed includes what its host lost.
    contention = known.contention_of(per_host)
    busy = profile.forward + profile.backward
    known = replace(known, alone=times.compute / (busy * contention))
    if shape.host is None:
        known = replace(known, per_host=per_host)
    if times.num_hosts > 1:
        known = replace(known, link=known.link or _NOMINAL)
    question = Question(per_host, batch_per_worker=times.share)
    if times.size == 1:
        return shape, known
    predicted = predict(shape, known, question, times.size).seconds
    assert predicted > 0
    return shape, fitted(shape, known, question, times.size, times.seconds)


def _phases(line: Fields, size: int) -> dict[str, Any] | None:
    """Return the figures of a line with the times of all workers; None if it lacks some."""
    seconds, speed = number(line, "seconds"), number(line, "images_per_second")
    if not seconds or not speed:
        return None
    found: dict[str, Any] = {"seconds": seconds, "images_per_second": speed}
    for phase in _PHASES:
        values = line.get(phase)
        if not isinstance(values, list) or len(values) != size:
            return None
        if not all(isinstance(each, int | float) and 0 <= each < 1e9 for each in values):
            return None
        found[phase] = values
    return found


def _section(fields: Fields, name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, Mapping) else {}
