"""The training loop of an elastic run: a step that failed is undone and repeated in another world.

`interrupt` undoes it, then the worker joins the next world (`generations`), and `enter` and `go`
continue there.
"""

from typing import Any

from allstep.comm.group.init import requested_changes
from allstep.train.health.stop_request import Stopping
from allstep.train.run.adapt_shares import report_new_world
from allstep.train.run.duties import Duties
from allstep.train.run.loop import Run
from allstep.train.run.placed_job import Job
from allstep.train.run.rounds.due import evaluates
from allstep.train.run.worlds.changes import Changes, LeaveWorld


class ElasticLoop(Run):
    """The execution of a job in one world after the other.

    `changes` and `duties` are those of this worker.
    """

    def __init__(self, job: Job, stopping: Stopping, changes: Changes, duties: Duties) -> None:
        super().__init__(job, duties.callbacks, stopping)
        self.changes, self.duties = changes, duties

    @property
    def commits(self) -> int:
        """The number of whole changes of the state: updates, and what is due after each."""
        progress = self.job.progress
        return 2 * progress.updates + (progress.owes is None)

    def interrupt(self) -> None:
        """Undo the round in progress: the state is that of the last commit."""
        job, progress = self.job, self.job.progress
        self.round.undo()
        self.round.close()
        self.checkpoints.is_alone = True
        # An evaluation needs the other ranks, the rest does not.
        if progress.owes is not None and not evaluates(job, progress.owes, progress.samples):
            self._settle(progress.owes)
        seconds = sum(self.clock.seconds.values())
        self.training_seconds += seconds
        self.seconds_since_evaluation += seconds

    def enter(self) -> None:
        """Continue in the world in which the job has been placed."""
        self._start_world()
        self.checkpoints.enter()

    def report_totals(self) -> None:
        """Send the callbacks the event about all changes of the world, if there were any."""
        if (totals := self.changes.totals).has_any:
            figures = {"lost": totals.lost, "joined": totals.joined, "gap": totals.seconds}
            self.callbacks.event(str(totals), total=True, **figures)

    def save_alone(self, why: str) -> None:
        """Save the state without the other ranks, before this worker ends."""
        progress, total = self.job.progress, self.job.total
        self.checkpoints.save_alone()
        self.callbacks.event(
            f"stopped and saved after {progress.samples} of {total} samples: {why}",
            samples=progress.samples,
        )

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        self.checkpoints.close()

    def report_change(self, change: tuple[str, dict[str, Any]] | None) -> None:
        """Send the callbacks the event about a change of the world, if there is one.

        If the shares of the run are not always even, another event has those of the new world.
        """
        if change is not None:
            text, figures = change
            self.callbacks.event(text, samples=self.job.progress.samples, **figures)
            report_new_world(self.job, self.callbacks, figures["position"])

    def _note_world(self, before: int) -> None:
        self.changes.note_step(self.commits, before, self.job.progress.samples)
        self.report_change(self.changes.end_change())
        self.duties.remind()

    def _note_push(self, count: int) -> None:
        # Fewer than the commits at the end of the round.
        self.changes.note_push(self.commits + count)
        self.report_change(self.changes.end_change())

    def _must_leave_world(self) -> bool:
        return bool(requested_changes())

    def _leave_world(self) -> None:
        raise LeaveWorld
