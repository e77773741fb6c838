"""The progress event of a run: what all ranks did since the last event."""

import math

import torch
import torch.distributed as dist

from allstep.train.run.opening_event import memory_in_use
from allstep.train.run.placed_job import Job
from allstep.train.step.step import PHASES, Clock
from allstep.train.task.task import Tally
from allstep.train.watch.events import Progress


def progress_event(job: Job, clock: Clock, tally: Tally) -> Progress:
    """Return the event for the steps since `clock` was restarted, and restart it. A collective.

    `tally` is that of all ranks over the same steps.
    """
    seconds = sum(clock.seconds.values())
    mine = torch.tensor([*clock.seconds.values(), memory_in_use()], dtype=torch.float64)
    by_rank = [torch.empty_like(mine) for _ in range(job.world.size)]
    dist.all_gather(by_rank, mine)
    *times, memory = torch.stack(by_rank).T.tolist()
    clock.restart()
    score, norms = tally.score(), job.trainer.optimizer.norms
    return Progress(
        epoch=(job.progress.samples - 1) // job.num_train,
        samples=job.progress.samples,
        loss=score.loss,
        accuracy=score.accuracy,
        lr=job.trainer.optimizer.param_groups[0]["lr"],
        seconds=seconds,
        images_per_second=score.count / max(seconds, 1e-9),
        times=dict(zip(PHASES, times, strict=True)),
        memory=[int(each) for each in memory],
        batch=job.progress.batch,
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
