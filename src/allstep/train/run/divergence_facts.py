"""What all ranks know of the step at which the loss went wrong."""

from allstep.comm.group import agree
from allstep.data import Batch
from allstep.train.checkpoint import files as checkpoint
from allstep.train.health.checkpoint_state import check_resumed
from allstep.train.health.divergence import Circumstances, Suspect
from allstep.train.run.setup import Job

_MOST = 8  # suspects of a rank


def circumstances(job: Job, batch: Batch) -> Circumstances:
    """All ranks together. `batch` is this rank's share."""
    optimizer, standing = job.trainer.optimizer, job.standing
    norms = optimizer.norms
    # Rank 0 explains the divergence; a folder with a checkpoint's name may hold something else.
    found = (
        checkpoint.newest(job.out / "checkpoints", check_resumed) if job.world.rank == 0 else None
    )
    return Circumstances(
        samples=standing.samples,
        epoch=standing.samples / job.num_train,
        lr=optimizer.param_groups[0]["lr"],
        batch=standing.batch,
        grad_norm=None if norms is None else norms.mean**0.5 / job.trainer.scale,
        suspects=[
            suspect for mine in agree.gather(job.world, _suspects(job, batch)) for suspect in mine
        ],
        checkpoint=None if found is None else found.path,
    )


def _suspects(job: Job, batch: Batch) -> list[Suspect]:
    """Samples of this rank whose loss was not finite; the first ones, where that is true of all or
    none."""
    rows = (job.trainer.not_finite or list(range(batch.weight)))[:_MOST]
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
