"""The checkpoints of a run: requested here, written by the `Saver` of rank 0.

```
_Run ── save ───> Checkpoints ──> Saver (a thread of rank 0) ──> checkpoints/NNN
                       ^── report ────┘ results, sent to the callbacks
     ── finish ─> the current state of the run is on disk:  it may end (status 0) or pause (75)
                  it is not:  all ranks end with status 1, and the last line names the checkpoint
                              from which a resume continues
```

If a checkpoint within the run cannot be written, only that checkpoint is lost. The last one is
required: a run that reports "ended" or "saved" without it would lose its training. So writing it is
tried again for some seconds, and all ranks get the result.
"""

import time
from collections import deque
from functools import partial

from allstep import faults
from allstep.comm.group import agree
from allstep.errors import AllstepError
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.names import name_of
from allstep.train.checkpoint.saver import Saved, Saver, first_not_finite
from allstep.train.health.checkpoint_state import check_resumed
from allstep.train.health.stop_request import Stopping
from allstep.train.run.capture import capture
from allstep.train.run.placed_job import Job
from allstep.train.watch.callback import Callback


class Checkpoints:
    """The checkpoints of the run `job`; `callback` receives an event for each of them.

    Only rank 0 writes, since all ranks have the same state; the others get the result in `finish`.
    """

    def __init__(self, job: Job, callback: Callback, stopping: Stopping) -> None:
        self.job, self.callback, self.stopping = job, callback, stopping
        self.folder = job.out / "checkpoints"
        self._results: deque[Saved] = deque()
        self._last = time.monotonic()
        samples = job.progress.samples
        is_saved = job.progress.owes is None and (self.folder / name_of(samples)).is_dir()
        self._begun_from = samples if is_saved else None
        # True between two worlds of an elastic run: no other rank can be asked for its state.
        self.is_alone = False
        # Samples of the last checkpoint that was requested, on all ranks.
        self._requested: int | None = None
        self._saver: Saver | None = None
        if job.world.rank == 0:
            self._saver = self._make_saver()

    def _make_saver(self) -> Saver:
        find_broken = partial(first_not_finite, self.job.trainer.model)
        keep, progress = self.job.config.save.keep, self.job.progress
        saver = Saver(self.folder, keep, self._results.append, find_broken)
        saver.best = progress.best_samples if progress.best else None
        return saver

    def enter(self) -> None:
        """Continue in another world of an elastic run; this rank may be its new rank 0.

        The checkpoint that the old rank 0 was asked to write may be missing. It is replaced by one
        of the present state. Where each rank has optimizer state of its own, it has that of rank 0.
        """
        if self.job.world.rank != 0:
            self.close()
            self._saver = None
        elif self.job.out.is_dir() and (self._saver is None or not self._saver.is_open):
            self._saver = self._make_saver()
            missing = self._requested
            if missing is not None and not (self.folder / name_of(missing)).is_dir():
                self.save(best=missing == self.job.progress.best_samples)
        self.is_alone = False

    def save_alone(self) -> None:
        """Write the current state at once, without other ranks. Raise AllstepError if it fails."""
        self.close()
        if self._saver is None and self.job.out.is_dir():
            self._saver = self._make_saver()
            self._saver.close()
        problem = self._missing()
        self.report()
        if problem:
            raise AllstepError(f"the last state is not saved: {problem}; {self._way_on()}")

    def are_due(self) -> bool:
        """Return whether `save.seconds` have passed since the last checkpoint.

        Where each rank has optimizer state of its own, all ranks save together, and rank 0's time
        counts. A collective then.
        """
        seconds = self.job.config.save.seconds
        if seconds is None:
            return False
        is_due = time.monotonic() - self._last >= seconds
        if self.is_alone or not self.job.trainer.optimizer.state_is_per_rank:
            return is_due
        return agree.rank_0_decides(self.job.world, lambda: is_due)

    def save(self, best: bool = False) -> None:
        """Start a checkpoint: rank 0 copies its tensors, and its thread writes them.

        `best` marks it as the best so far.
        """
        self._last, self._requested = time.monotonic(), self.job.progress.samples
        if not self.is_alone:
            self.job.trainer.optimizer.gather_state()
        if faults.active is not None:
            faults.active.at_commit()
        if self._saver is not None:
            self._saver.save(capture(self.job), best)

    def report(self) -> None:
        """Send the callback an event for each checkpoint that was written or failed."""
        while self._results:
            saved = self._results.popleft()
            if saved.path is not None:
                self.stopping.note_cost("checkpoint", saved.seconds)
                self.callback.saved(saved.samples, saved.path)
            else:
                problem = f"checkpoint {saved.samples:012} was not written: {_text(saved.error)}"
                kept = "earlier checkpoints are kept, and the run continues"
                self.callback.event(f"{problem}; {kept}", samples=saved.samples)

    def close(self) -> None:
        """Wait until all checkpoints are written, and report them."""
        if self._saver is not None:
            self._saver.close()
        self.report()

    def finish(self, what: str) -> None:
        """Ensure that the current state of the run is on disk, else end all ranks. A collective.

        `what` states for the error message what the run did so far.
        """
        self.close()
        if self.job.progress.samples != self._requested:
            self.job.trainer.optimizer.gather_state()
        problem = agree.rank_0_decides(self.job.world, self._missing)
        self.report()
        if problem:
            self.callback.event(
                f"the last checkpoint was not written: {problem}", samples=self.job.progress.samples
            )
            error = AllstepError(f"{what}, but that is not saved: {problem}; {self._way_on()}")
            raise error if self.job.world.rank == 0 else SystemExit(error.exit_code)

    def _missing(self) -> str:
        """Write the current state unless it is on disk. Return the problem, "" if there is none."""
        if self._saver is None:
            return f"{self.job.out}: this host has no such folder"
        if self.job.progress.samples in (self._saver.last, self._begun_from):
            return ""
        saved = self._saver.write_or_retry(capture(self.job))
        return "" if saved.path is not None else _text(saved.error)

    def _way_on(self) -> str:
        """Return how to resume the run, for an error message."""
        path = checkpoint.newest(self.folder, check_resumed).path
        start = "the start of the run: there is no complete checkpoint"
        where = f"checkpoint {path.name}" if path else start
        return f"once that is fixed, --resume {self.job.out} continues from {where}"


def _text(error: Exception | None) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
