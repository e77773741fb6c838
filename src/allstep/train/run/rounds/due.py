"""The positions at which something is due that all ranks do together: they end a round.

They depend only on the config and the position, so that a resumed run does the same.
"""

from allstep.train.run.placed_job import Job
from allstep.train.run.progress import crossed


def evaluates(job: Job, before: int, after: int) -> bool:
    """Return whether an evaluation is due after samples `before` to `after`."""
    return after == job.total or crossed(before, after, job.config.evaluation.every * job.num_train)


def saves(job: Job, before: int, after: int) -> bool:
    """Return whether a checkpoint by epochs is due after samples `before` to `after`."""
    per_epoch = job.config.save.epochs
    return after == job.total or crossed(before, after, per_epoch and per_epoch * job.num_train)


def ends_round(job: Job, before: int, after: int) -> bool:
    """Return whether a round of several updates ends after samples `before` to `after`.

    It ends at the end of an epoch as well, and where the batch grows at an epoch.
    """
    if crossed(before, after, job.num_train):
        return True
    grows = any(before < epoch * job.num_train <= after for epoch in job.config.growth.at)
    return grows or evaluates(job, before, after) or saves(job, before, after)
