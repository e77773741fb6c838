"""Shares by speed during a run: after a step, give every worker what the rule decides.

All ranks have exchanged the same times, so all change their loader and trainer between the same two
steps. Each change is an event with its position and the weights: together they are the run's
history of shares, which timing decides and no seed repeats. A new world of an elastic run begins
with other shares, so it has an event as well.
"""

from allstep.data.order import Weights, even
from allstep.train.config.initial_weights import replaced
from allstep.train.run.placed_job import Job
from allstep.train.step.after_step import StepOutcome
from allstep.train.watch.callback import Callback

# Workers whose shares an event lists in its text; of more, the smallest and the largest.
_LISTED = 8


def adapt_shares(job: Job, outcome: StepOutcome, callbacks: Callback) -> None:
    """Add the last step to the rule, and change the shares if it decides so."""
    if job.speed_rule is None:
        return
    weights = job.speed_rule.add(outcome.seconds, outcome.samples, job.progress.batch)
    if weights is not None:
        set_shares(job, weights)
        samples, batch = job.progress.samples, job.progress.batch
        callbacks.event(_text(weights), samples=samples, batch=batch, shares=list(weights))


def set_shares(job: Job, weights: Weights) -> None:
    """Divide the next batches by these weights. All ranks must do so between the same two steps."""
    job.loaders["train"].shares = weights
    job.trainer.shares = weights
    progress = job.progress
    # The largest share of a batch that has grown may need more micro-batches, to fit into memory.
    if progress.batch != job.config.batch:
        count = job.growth.num_micro_batches(progress.batch, weights, job.config.accumulation)
        job.set_num_micro_batches(count)


def report_new_world(job: Job, callbacks: Callback, position: int) -> None:
    """Record the shares with which a new world of an elastic run continues from `position`.

    Nothing is recorded in a run whose shares are always even.
    """
    shares, weights = job.config.shares, job.loaders["train"].shares
    if shares == "even":
        return
    size = len(weights)
    workers = f"{size} worker{'' if size == 1 else 's'}"
    if shares == "speed":
        text = f"shares by speed: even at first for the {workers} that continue"
    else:
        text = replaced(shares, size) or f"shares={list(shares)} for the {workers} that continue"
    callbacks.event(text, samples=position, batch=job.progress.batch, shares=list(weights))


def _text(weights: Weights) -> str:
    if weights == even(len(weights)):
        return f"shares by speed: even again for {len(weights)} workers"
    several = ", ".join(map(str, weights))
    if len(weights) > _LISTED:
        several = f"{min(weights)} to {max(weights)}"
    workers = f"workers 0 to {len(weights) - 1}"
    return f"shares by speed: {several} of {sum(weights)} samples for {workers}"
