"""The round of synchronous training: one update from one global batch, on all ranks at once.

All collectives come before the update, except for weights that are shared (D15).
"""

import time

from allstep import faults
from allstep.train.run.rounds.round import Agreement, Surroundings
from allstep.train.run.rounds.share_stream import ShareStream, raise_together
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import reduce_step, update_weights


class EachStep:
    """Rounds of one update (`sync=allreduce`, `sync=server`)."""

    def __init__(self, around: Surroundings) -> None:
        self._around, self._shares = around, ShareStream(around.job)
        self._has_stepped = False

    def go(self) -> Agreement:
        """Make one update."""
        begun, stopping = time.perf_counter(), self._around.stopping
        agreement = self._step()
        # The first step includes one-off set-up.
        if self._has_stepped:
            stopping.note_cost("step", time.perf_counter() - begun)
        self._has_stepped = True
        return agreement

    def _step(self) -> Agreement:
        around, job = self._around, self._around.job
        progress, clock = job.progress, around.clock
        batch, error = self._shares.take()
        after = min(progress.samples + progress.batch, job.epoch_end(progress.samples))
        job.trainer.optimizer.measure_norms = job.noise is not None or self._logs_next()
        if faults.active is not None:
            faults.active.at_step(progress.updates + 1, batch.samples)
        own = clock.per_sample
        mine = reduce_step(job.trainer, batch, after - progress.samples, clock)
        own = clock.per_sample - own
        stops, failed = around.stopping.why is not None, error is not None
        report = StepReport(mine, batch.weight, stops, failed, own, around.must_leave_world())
        outcome = job.after_step.exchange(report)
        clock.lap("wait")
        if outcome.failed:
            raise_together(job, error)
        # The commit: from here on no other rank is needed, except for weights that are shared.
        update_weights(job.trainer, batch.position, clock)
        job.after_step.statistics.keep()
        return Agreement(outcome, after, 1, batch, batch.weight)

    def _logs_next(self) -> bool:
        job = self._around.job
        return (job.progress.updates + 1) % job.config.log_every == 0

    def undo(self) -> None:
        """Return to the running statistics after the last step; its weights are still there."""
        self._around.job.after_step.statistics.restore()

    def close(self) -> None:
        """End the loop over the data."""
        self._shares.close()
