"""The positions at which something is due that all ranks do together: they end a round.

They depend only on the config and the position, so that a resumed run does the same.
"""

import math

from allstep.train.run.placed_job import Job
from allstep.train.run.progress import crossed


def evaluates(job: Job, before: int, after: int) -> bool:
    """Return whether an evaluation is due after samples `before` to `after`."""
    return after == job.total or crossed(before, after, job.config.evaluation.every * job.num_train)


def saves(job: Job, before: int, after: int) -> bool:
    """Return whether a checkpoint by epochs is due after samples `before` to `after`."""
    per_epoch = job.config.save.epochs
    return after == job.total or crossed(before, after, per_epoch and per_epoch * job.num_train)


def next_due(job: Job) -> int:
    """Return the next position at which a round of claims ends."""
    before, config = job.progress.samples, job.config
    epochs = [1.0, config.evaluation.every, config.save.epochs or 1.0]
    ends = [_next_multiple(before, each * job.num_train) for each in epochs]
    ends += [math.ceil(each * job.num_train) for each in config.growth.at]
    return min(
        [each for each in ends if each > before and ends_round(job, before, each)],
        default=job.total,
    )


def _next_multiple(before: int, interval: float) -> int:
    """Return the first position after `before` at which another interval is complete."""
    after = max(before + 1, math.floor((math.floor(before / interval + 1e-6) + 1) * interval))
    while not crossed(before, after, interval):
        after += 1
    return after


def ends_round(job: Job, before: int, after: int) -> bool:
    """Return whether a round of several updates ends after samples `before` to `after`.

    It ends at the end of an epoch as well, and where the batch grows at an epoch.
    """
    if crossed(before, after, job.num_train):
        return True
    grows = any(before < epoch * job.num_train <= after for epoch in job.config.growth.at)
    return grows or evaluates(job, before, after) or saves(job, before, after)
