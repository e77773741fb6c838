"""The round of local SGD and DiLoCo: some updates of each rank alone, then the mean of the weights.

```
rank 0   step  step ... step ┐  the small sum: tallies of the round, running statistics
rank 1   step  step ... step ┘  the mean of the weights, and the outer step
```

A rank takes its share of each global batch as in synchronous training, and steps on the mean
gradient of its own share, or of its host's if hosts are the parties. A share without samples makes
no step. The round has H updates, or fewer if something is due before (`due`). With `local:H:E` the
rounds before epoch E are those of synchronous training.

The outer step and what a checkpoint holds are described in `parallel.updates.averaging`.
"""

import time

from allstep import faults
from allstep.data import Batch
from allstep.errors import UserError
from allstep.parallel.updates import Averaging
from allstep.train.run.placed_job import Job
from allstep.train.run.rounds.due import ends_round
from allstep.train.run.rounds.each_step import EachStep
from allstep.train.run.rounds.round import Agreement, Round, Surroundings
from allstep.train.run.rounds.share_stream import ShareStream, raise_together
from allstep.train.step.after_step import StepReport
from allstep.train.step.step import reduce_step, update_weights
from allstep.train.task.task import Tally


class LocalSteps:
    """Rounds of up to H updates of each rank alone."""

    def __init__(self, around: Surroundings) -> None:
        self._around, self._shares = around, ShareStream(around.job)
        self._num_steps = around.job.config.sync.mode.number
        # The first round includes one-off set-up.
        self._has_gone = False

    def go(self) -> Agreement:
        """Make the updates of this rank, then average the weights of all ranks."""
        begun, around, job = time.perf_counter(), self._around, self._around.job
        # A step of this rank is one of a world of one: no other rank has a part of its gradient.
        job.trainer.size, job.trainer.shares = 1, ()
        steps = _Steps(around, self._shares)
        position = steps.go(self._num_steps)
        around.clock.lap("update")
        outcome = job.after_step.exchange(steps.report())
        if outcome.failed:
            raise_together(job, steps.error)
        job.trainer.optimizer.synchronize_weights()
        around.clock.lap("wait")
        # The commit: from here on no other rank is needed.
        job.after_step.statistics.keep()
        if self._has_gone:
            around.stopping.note_cost("step", time.perf_counter() - begun)
        self._has_gone = True
        return Agreement(outcome, position, steps.updates, steps.last, steps.samples)

    def undo(self) -> None:
        """Return to weights, optimizer state and running statistics after the last `go`."""
        job = self._around.job
        _averaging(job).undo(job.trainer.optimizer)
        job.after_step.statistics.restore()

    def close(self) -> None:
        """End the loop over the data."""
        self._shares.close()


class _Steps:
    """The updates of this rank in one round, and their sums."""

    def __init__(self, around: Surroundings, shares: ShareStream) -> None:
        self._around, self._shares = around, shares
        self._tally: Tally = around.job.trainer.task.tally()
        self.samples, self._seconds = 0, 0.0
        self._steps_together = _averaging(around.job).steps_together
        self.updates = 0
        self.error: UserError | None = None
        self.last: Batch = around.job.empty_batch()

    def go(self, num_steps: int) -> int:
        """Make up to `num_steps` updates. Return the position after them."""
        job = self._around.job
        position, is_over = job.progress.samples, False
        while not is_over and self.updates < num_steps:
            is_valid = self._step() or self._steps_together
            self.updates += 1
            before = position
            position = min(before + job.progress.batch, job.epoch_end(before))
            is_over = not is_valid or ends_round(job, before, position)
        return position

    def _step(self) -> bool:
        """Make one update from this rank's share. Return False if it is invalid, and not made."""
        around, job = self._around, self._around.job
        trainer, clock = job.trainer, around.clock
        # After an error the others of a party still need this rank, without samples.
        batch = job.empty_batch()
        if self.error is None:
            batch, self.error = self._shares.take()
        if self.error is not None and not self._steps_together:
            return False
        number = job.progress.updates + self.updates + 1
        if faults.active is not None:
            faults.active.at_step(number, batch.samples)
        trainer.optimizer.measure_norms = number % job.config.log_every == 0
        trainer.optimizer.weight = batch.weight
        own = clock.per_sample
        self._tally = self._tally + reduce_step(trainer, batch, max(1, batch.weight), clock)
        self._seconds += clock.per_sample - own
        update_weights(trainer, batch.position, clock)
        self.samples, self.last = self.samples + batch.weight, batch
        return True

    def report(self) -> StepReport:
        """Return what this rank reports about its round."""
        return StepReport(
            self._tally,
            self.samples,
            wants_stop=self._around.stopping.why is not None,
            failed=self.error is not None,
            seconds=self._seconds,
            wants_change=self._around.must_leave_world(),
        )


def _averaging(job: Job) -> Averaging:
    update = job.trainer.optimizer.replica_update
    assert isinstance(update, Averaging)
    return update


class LocalFromEpoch:
    """Rounds of one update of all ranks before an epoch, then those of `LocalSteps`."""

    def __init__(self, around: Surroundings) -> None:
        self._around, job = around, around.job
        self._first = job.config.sync.mode.from_epoch * job.num_train
        self._round: Round = EachStep(around)
        self._averages = False

    def go(self) -> Agreement:
        """Make a round of the kind that the present epoch has."""
        job = self._around.job
        if not self._averages and job.progress.samples >= self._first:
            self._averages = True
            self._round.close()
            self._round = LocalSteps(self._around)
        _averaging(job).switch(job.trainer.optimizer, self._averages)
        return self._round.go()

    def undo(self) -> None:
        """Return to the state after the last `go`, if its round can."""
        self._round.undo()

    def close(self) -> None:
        """End the loop over the data."""
        self._round.close()
