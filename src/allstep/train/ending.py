"""Which weights are tested at the end: the last ones, or the best on the validation part, read back from their checkpoint."""

import copy
from pathlib import Path

from torch import nn

from allstep.errors import CheckpointError
from allstep.train import agree, checkpoint
from allstep.train.checkpoint import Snapshot
from allstep.train.job import Job
from allstep.train.restore import with_weights
from allstep.train.watch import Watcher


def chosen_net(job: Job, watcher: Watcher) -> tuple[nn.Module, str]:
    """The net to be tested, and which that is. All ranks together, when all checkpoints are written."""
    last, choose = job.evaluated_net, job.config.evaluation.choose
    if choose == "last" or job.standing.best_samples == job.standing.samples:
        return last, choose
    path = job.out / "checkpoints" / f"{job.standing.best_samples:012}"
    snapshot, problem = agree.rank_0_decides(job.world, lambda: _read_or_not(path))
    if snapshot is None:
        watcher.event(f"the best weights cannot be read, the last ones are tested: {problem}")
        return last, "last"
    return with_weights(copy.deepcopy(last), snapshot, str(path)), "best"


def _read_or_not(path: Path) -> tuple[Snapshot | None, str]:
    try:
        return checkpoint.read(path), ""
    except CheckpointError as error:
        return None, str(error)
