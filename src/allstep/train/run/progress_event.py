"""The progress event of a run: what all ranks did since the last event.

It is made at the end of a round, together with all ranks (`progress_event`). In a long round
without common steps rank 0 makes events alone, from figures that the ranks leave in shared memory
(`rounds.live_lines`); what they have reported is `Reported`, and the event at the end has the rest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from allstep.parallel.traffic import Traffic
from allstep.train.run.opening_event import memory_in_use
from allstep.train.run.placed_job import Job
from allstep.train.step.step import PHASES, Clock
from allstep.train.task.task import Tally
from allstep.train.watch.events import Progress

Times = Sequence[Sequence[float]]
"""Seconds of each phase, then samples, bytes sent and bytes received (rows) by rank."""


class OwnWork:
    """What this rank has done since a moment, besides seconds; an event of all ranks has it."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self.samples = 0
        self._sent, self._received = self._traffic.sent, self._traffic.received

    def drop(self, traffic: tuple[int, int]) -> None:
        """Count these bytes no longer: an event has them."""
        self._sent, self._received = self._sent + traffic[0], self._received + traffic[1]

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        return self._traffic.sent - self._sent, self._traffic.received - self._received


@dataclass
class Reported:
    """What events within the round have reported already; only rank 0 has any.

    They may have reported samples of a rank that is lost by now, which the whole then lacks.
    """

    tally: Tally | None = None
    times: Times = ()
    seconds: float = 0.0

    def add(self, tally: Tally, times: Times, seconds: float) -> None:
        """Add an event."""
        is_first = self.tally is None
        self.tally = tally if self.tally is None else self.tally + tally
        self.times = times if is_first else _combined(self.times, times, 1)
        self.seconds += seconds

    def rest(self, tally: Tally, times: Times, seconds: float) -> tuple[Tally, Times, float]:
        """Return what no event has reported yet of the whole, and forget what they have."""
        reported = Reported(self.tally, self.times, self.seconds)
        self.tally, self.times, self.seconds = None, (), 0.0
        if reported.tally is None:
            return tally, times, seconds
        left = [
            whole - part for whole, part in zip(tally.sums(), reported.tally.sums(), strict=True)
        ]
        return (
            tally.with_sums(left),
            _combined(times, reported.times, -1),
            max(0.0, seconds - reported.seconds),
        )


def _combined(times: Times, others: Times, sign: int) -> Times:
    """Return the sum or difference of two tables of seconds, at least 0."""
    return [
        [max(0.0, ours + sign * theirs) for ours, theirs in zip(row, other, strict=True)]
        for row, other in zip(times, others, strict=True)
    ]


def progress_event(
    job: Job, clock: Clock, tally: Tally, own: OwnWork, reported: Reported
) -> Progress | None:
    """Return the event for the steps since `clock` was restarted, and restart it. A collective.

    `tally` is that of all ranks over the same steps, `own` the work of this rank, which restarts as
    well. None if all of it was `reported` already, or if there was nothing.
    """
    seconds = sum(clock.seconds.values())
    numbers = [*clock.seconds.values(), own.samples, *own.traffic, memory_in_use()]
    mine = torch.tensor(numbers, dtype=torch.float64)
    by_rank = [torch.empty_like(mine) for _ in range(job.world.size)]
    dist.all_gather(by_rank, mine)
    *times, memory = torch.stack(by_rank).T.tolist()
    clock.restart()
    own.restart()
    tally, rest, seconds = reported.rest(tally, times, seconds)
    if tally.count <= 0:
        return None
    version = job.progress.updates
    return event_of(job, job.progress.samples, tally, rest, memory, seconds, version)


def event_of(
    job: Job,
    position: int,
    tally: Tally,
    times: Times,
    memory: Sequence[float],
    seconds: float,
    version: int | None = None,
) -> Progress:
    """Return the event for a tally of all ranks up to `position`.

    `memory` is the bytes in use by rank, `version` the updates of the weights.
    """
    phases = times[: len(PHASES)]
    counts, sent, received = ([int(each) for each in row] for row in times[len(PHASES) :])
    score, norms = tally.score(), job.trainer.optimizer.norms
    return Progress(
        epoch=(position - 1) // job.num_train,
        samples=position,
        loss=score.loss,
        accuracy=score.accuracy,
        lr=job.trainer.optimizer.param_groups[0]["lr"],
        seconds=seconds,
        images_per_second=score.count / max(seconds, 1e-9),
        times={name: list(row) for name, row in zip(PHASES, phases, strict=True)},
        memory=[int(each) for each in memory],
        batch=job.progress.batch,
        counts=counts,
        sent=sent,
        received=received,
        version=version,
        grad_norm=None if norms is None else finite(norms.mean**0.5 / job.trainer.scale),
        noise_scale=finite(job.noise.scale) if job.noise is not None else None,
        trust=_trust_ratios(job),
    )


def _trust_ratios(job: Job) -> dict[str, float] | None:
    """Return the trust ratio of each layer; None if the optimizer has none."""
    ratios = getattr(job.trainer.optimizer, "trust_ratios", None)
    return None if ratios is None else dict(ratios())


def finite(value: float) -> float | None:
    """Return `value`, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if math.isfinite(value) else None
