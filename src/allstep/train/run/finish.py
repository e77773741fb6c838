"""The end of a run: the weights that are tested, and their score on training samples.

```
last weights, or the best on the validation split (read from their checkpoint)
  |── the test split, once: the result of the run
  `── a fixed sample of the training split: compared with validation it shows over- and underfitting
      (allstep report)
```

The score on the training sample is only for the report, and a run does not fail because of it: a
signal interrupts it, and a sample that cannot be read becomes an event.
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
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.broadcast import broadcast_snapshot
from allstep.train.checkpoint.restore import with_weights
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.health.checkpoint_state import check_used
from allstep.train.input.classes import check_same_classes
from allstep.train.input.loaders import make_sample_loader
from allstep.train.run.placed_job import Job
from allstep.train.score.evaluate import Interrupted
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Score, TrainingScore


def chosen_model(job: Job, callback: Callback) -> tuple[nn.Module, str]:
    """Return the model to be tested, and "last" or "best" for the weights that it has.

    A collective; all checkpoints must be written before.
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
    """Return the score on the training sample; None without one or if it failed. A collective.

    `chosen` is the second value of `chosen_model`. `score` evaluates the model with a loader.
    """
    started = time.perf_counter()
    try:
        found = _score_of_sample(job, score)
    except Interrupted:
        return None
    except (UserError, EndedElsewhere) as error:
        callback.event(f"no training score in evaluation mode: {error}")
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
