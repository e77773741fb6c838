"""The end of a run: which weights are tested, and how good these are on samples that they were
trained on.

```
last weights, or the best on the validation part (read back from their checkpoint)
  |── the test part, once: what is quoted
  `── a fixed sample of the training split: next to validation it shows over- and underfitting (allstep report)
```

The training sample is a figure for the report. It changes nothing, and a run does not fail for it:
a signal cuts it short, and a sample that cannot be read is an event.
"""

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from allstep.comm.group import agree
from allstep.comm.group.agree import EndedElsewhere
from allstep.data import Loader
from allstep.errors import CheckpointError, DataError, UserError
from allstep.train.checkpoint import files as checkpoint
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.checkpoint.files import Snapshot
from allstep.train.checkpoint.restore import with_weights
from allstep.train.health.checkpoint_state import check_used
from allstep.train.input.classes import check_same_classes
from allstep.train.input.loaders import make_sample_loader
from allstep.train.run.setup import Job
from allstep.train.score.evaluate import Interrupted
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Score, TrainingScore


def chosen_model(job: Job, callback: Callback) -> tuple[nn.Module, str]:
    """The model to be tested, and which that is.

    All ranks together, when all checkpoints are written.
    """
    last, choose = job.evaluated_model, job.config.evaluation.weights
    if choose == "last" or job.progress.best_samples == job.progress.samples:
        return last, choose
    path = job.out / "checkpoints" / f"{job.progress.best_samples:012}"
    found, problem = _read_or_not(path, job.splits.classes) if job.world.rank == 0 else (None, "")
    problem = agree.rank_0_decides(job.world, lambda: problem)
    snapshot = broadcast_snapshot(job.world, found)
    if snapshot is None:
        callback.event(f"the best weights cannot be read, the last ones are tested: {problem}")
        return last, "last"
    return with_weights(copy.deepcopy(last), snapshot, str(path)), "best"


def training_score(
    job: Job, chosen: str, score: Callable[[Loader], Score], callback: Callback
) -> TrainingScore | None:
    """What `score` gives for the training sample, all ranks together; None where there is none.

    `chosen`: as of `chosen_model`.
    """
    started = time.perf_counter()
    try:
        found = _score_of_sample(job, score)
    except Interrupted:
        return None
    except (UserError, EndedElsewhere) as error:
        callback.event(f"no training accuracy in evaluation mode: {error}")
        return None
    samples = job.progress.best_samples if chosen == "best" else job.progress.samples
    return None if found is None else TrainingScore(found, samples, time.perf_counter() - started)


def _score_of_sample(job: Job, score: Callable[[Loader], Score]) -> Score | None:
    device = next(job.trainer.model.parameters()).device
    loader = agree.everyone(
        job.world, lambda: make_sample_loader(job.config, job.splits, job.world, device)
    )
    if loader is None:
        return None
    try:
        return score(loader)
    finally:
        loader.close()


def _read_or_not(path: Path, classes: Sequence[str]) -> tuple[Snapshot | None, str]:
    try:
        snapshot = checkpoint.read(path)
        check_used(snapshot)
        check_same_classes(str(path), snapshot.state["pictures"]["classes"], classes)
        return snapshot, ""
    except (CheckpointError, DataError) as error:
        return None, str(error)
