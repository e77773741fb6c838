"""The shares of this rank of the global batches, one after the other, in one world."""

from collections.abc import Generator

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.errors import UserError
from allstep.train.run.placed_job import Job


class ShareStream:
    """This rank's shares of the global batches from the position of `job` on."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._batches = self._read()

    def _read(self) -> Generator[Batch]:
        job = self._job
        job.loaders["train"].batch = job.progress.batch
        yield from job.loaders["train"].batches(job.progress.samples, job.total)

    def take(self) -> tuple[Batch, UserError | None]:
        """Return the next share and None; or an empty share and the error if it is invalid.

        With the empty share this rank completes the step, after which all ranks learn of the error.
        """
        job = self._job
        try:
            batch = next(self._batches)
            job.trainer.task.check_targets(batch, job.loaders["train"])
            return batch, None
        except UserError as error:
            return job.empty_batch(), error

    def close(self) -> None:
        """End the loop over the loader."""
        self._batches.close()


def raise_together(job: Job, error: UserError | None) -> None:
    """Raise the error of a rank on all ranks. A collective."""
    agree.everyone(job.world, lambda: _raise(error))


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
