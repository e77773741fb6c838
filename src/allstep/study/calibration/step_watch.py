"""The times within a training step of one worker: forward, each gradient, update, input.

A hook on the model records when forward ends, a hook on each parameter when its gradient is
complete. The steps are those of a run: batches of the real loader, the real optimizer and the
exchange after the step; only evaluations and checkpoints are missing.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median, pstdev
from typing import Any

import torch
from torch import nn

from allstep.data import Batch
from allstep.plan.calibration import StepTimes
from allstep.train.run.placed_job import Job
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import Clock, step

WARM_UP, LEAST, MOST, SECONDS = 2, 4, 40, 2.0
"""Steps before the measured ones; measured steps, within these seconds."""
# From this part of a step on, a worker that waits for its input is slower than its input.
_WAITS = 0.02
_EPOCHS = 1000


@dataclass
class OneStep:
    """What was seen of one step, in seconds from its start."""

    began: float = 0.0
    forward: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)


class StepWatch:
    """Hooks on a model; `now` has the times of the step in progress."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.now = OneStep()
        self._is_cuda = bool(self.parameters) and self.parameters[0].is_cuda
        self._hooks: list[Any] = [model.register_forward_hook(self._end_forward)]
        for place, each in enumerate(self.parameters):
            self._hooks.append(self._watch(place, each))

    def _watch(self, place: int, parameter: nn.Parameter) -> Any:
        def complete(_: torch.Tensor) -> None:
            self.now.ready[place] = self._seconds()

        register: Any = parameter.register_post_accumulate_grad_hook
        return register(complete)

    def begin(self) -> None:
        """Start a step now."""
        self.now = OneStep()
        self.now.began = self._seconds()

    def _end_forward(self, *_: object) -> None:
        self.now.forward = self._seconds() - self.now.began

    def _seconds(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def close(self) -> None:
        """Remove the hooks."""
        for each in self._hooks:
            each.remove()


@contextmanager
def watching(model: nn.Module) -> Iterator[StepWatch]:
    """Yield the watch of a model."""
    watch = StepWatch(model)
    try:
        yield watch
    finally:
        watch.close()


@dataclass
class _Seen:
    """The measured steps, one entry each."""

    computed: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    updated: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    ready: list[list[float]] = field(default_factory=list)


def time_alone(job: Job, batch: int, seconds: float = SECONDS) -> StepTimes:
    """Return the times of a job of one worker with `batch` samples."""
    job.loaders["train"].batch = batch
    seen, clock = _Seen(), Clock()
    with watching(job.trainer.model) as watch, closing(_batches(job)) as batches:
        for number, share in enumerate(batches):
            if number == WARM_UP:
                began = time.perf_counter()
            before = dict(clock.seconds)
            watch_step(job, share, clock, watch)
            if number < WARM_UP:
                continue
            _note(seen, watch, before, clock)
            enough = time.perf_counter() - began >= seconds
            if len(seen.computed) >= (LEAST if enough else MOST):
                break
    return _summary(seen, batch)


def watch_step(job: Job, share: Batch, clock: Clock, watch: StepWatch | None = None) -> None:
    """Make one step of a run with this share."""
    train = job.loaders["train"]
    count = min(train.batch, job.num_train - share.position % job.num_train)
    clock.lap("input")
    if watch is not None:
        watch.begin()
    tally = step(job.trainer, share, count, clock)
    clock.lap("update")
    # The exchange runs over all ranks of the process group, those of other jobs included.
    if job.world.size > 1:
        job.after_step.exchange(StepReport(tally, share.weight))
        clock.lap("wait")
    if job.ema is not None:
        job.ema.update()
    clock.lap("update")


def _note(seen: _Seen, watch: StepWatch, before: dict[str, float], clock: Clock) -> None:
    spent = {phase: clock.seconds[phase] - before[phase] for phase in before}
    seen.computed.append(spent["compute"])
    seen.updated.append(spent["update"] + spent["wait"])
    seen.waited.append(spent["input"])
    seen.forward.append(watch.now.forward)
    end = watch.now.began + spent["compute"]
    seen.ready.append(
        [
            watch.now.ready.get(place, end) - watch.now.began
            for place in range(len(watch.parameters))
        ]
    )


def _summary(seen: _Seen, batch: int) -> StepTimes:
    compute = median(seen.computed)
    forward = min(median(seen.forward), 0.999 * compute) or compute / 3
    update, waited = median(seen.updated), fmean(seen.waited)
    ready = tuple(min(compute, median(each)) for each in zip(*seen.ready, strict=True))
    busy = compute + update
    return StepTimes(
        batch=batch,
        forward=forward,
        backward=compute - forward,
        ready=ready,
        update=update,
        input=busy + waited if waited > _WAITS * busy else 0.0,
        jitter=spread(seen.computed),
    )


def spread(values: list[float]) -> float:
    """Return the std relative to the mean, from the middle two thirds: an outlier is no jitter."""
    if len(values) < 6:
        return pstdev(values) / fmean(values)
    ordered, count = sorted(values), len(values)
    low, high = ordered[round(0.16 * (count - 1))], ordered[round(0.84 * (count - 1))]
    return (high - low) / 2 / median(ordered)


def time_input(job: Job, batch: int, seconds: float = 1.0) -> float:
    """Return the seconds in which the input pipeline alone provides a batch."""
    loader = job.loaders["train"]
    loader.batch = batch
    times: list[float] = []
    with closing(_batches(job)) as batches:
        # Those that were prepared before the first one was taken do not count.
        prepared, began = 8, time.perf_counter()
        for _ in batches:
            times.append(time.perf_counter())
            if len(times) > prepared + 4 and times[-1] - began > seconds:
                break
            if times[-1] - began > 4 * seconds and len(times) > 2:
                break
    first = min(prepared, len(times) - 2)
    return (times[-1] - times[first]) / (len(times) - 1 - first)


def _batches(job: Job) -> Any:
    """Return the shares of a run without an end."""
    return job.loaders["train"].batches(0, _EPOCHS * job.num_train)


def time_together(job: Job, num_steps: int) -> float:
    """Return the median seconds of a step of all ranks. A collective."""
    clock, times = Clock(), list[float]()
    with closing(_batches(job)) as batches:
        for share in batches:
            began = time.perf_counter()
            watch_step(job, share, clock)
            times.append(time.perf_counter() - began)
            if len(times) == WARM_UP + num_steps:
                break
    return median(times[WARM_UP:])
