"""The facts about the step at which a run diverged, gathered from all ranks."""

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.health.checkpoint_state import check_resumed
from allstep.train.health.divergence import Circumstances, Suspect
from allstep.train.run.placed_job import Job

# Suspects that each rank names.
_MAX_SUSPECTS = 8


def circumstances(job: Job, batch: Batch) -> Circumstances:
    """Return the facts about the last step. A collective; `batch` is this rank's share.

    The newest checkpoint is only known on rank 0.
    """
    optimizer, progress = job.trainer.optimizer, job.progress
    norms = optimizer.norms
    # Only rank 0 reports the divergence. Checked, because a folder with a checkpoint's name may
    # have other content.
    found = (
        checkpoint.newest(job.out / "checkpoints", check_resumed) if job.world.rank == 0 else None
    )
    return Circumstances(
        samples=progress.samples,
        epoch=progress.samples / job.num_train,
        lr=optimizer.param_groups[0]["lr"],
        batch=progress.batch,
        grad_norm=None if norms is None else norms.mean**0.5 / job.trainer.scale,
        suspects=[
            suspect for mine in agree.gather(job.world, _suspects(job, batch)) for suspect in mine
        ],
        checkpoint=None if found is None else found.path,
    )


def _suspects(job: Job, batch: Batch) -> list[Suspect]:
    """Return up to 8 samples of this rank whose loss is not finite, or the first 8 if all are."""
    rows = (job.trainer.not_finite or list(range(batch.weight)))[:_MAX_SUSPECTS]
    inputs = job.trainer.to_input(batch.data[rows]) if rows else batch.data
    return [
        Suspect(
            rank=job.world.rank,
            number=int(batch.samples[row]),
            place=str(job.loaders["train"].source.place(int(batch.samples[row]))),
            is_finite=bool(image.isfinite().all()),
        )
        for row, image in zip(rows, inputs, strict=False)
    ]
