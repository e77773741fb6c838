"""Capture the state of a run for a checkpoint or for another worker, and load it into a job.

```
weights.safetensors      the model's parameters and buffers
optimizer.safetensors    "<parameter>/<name>" of the optimizer; "<tensor>/average" of the EMA, if
                         the run has one
state.json               the progress of the run (key "standing"), the optimizer's numbers, and the
                         images that the model takes (classes, shape, mean, ...)
```

A checkpoint does not depend on the time, the host or the number of workers, with two exceptions:
for a growing batch it stores the number of samples that a worker can compute at once, and with
`sync=local` or `diloco` the optimizer's state of each worker (`parallel.updates.party_states`).

`load` is the inverse for a job that exists: in an elastic run a worker that joins, or one that
missed the last update, takes the state of another. A resumed run builds its job from the snapshot
(`setup`).
"""

from dataclasses import asdict
from typing import Any

from allstep.optim import RunningNoiseScale
from allstep.train.checkpoint import optimizer_state
from allstep.train.checkpoint.restore import (
    EMA_SUFFIX,
    averaged_weights,
    load_optimizer,
    load_weights,
    parameter_names,
)
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.health.divergence import LossWatch
from allstep.train.precision.precision import Precision
from allstep.train.run.placed_job import Job
from allstep.train.run.progress import RunProgress
from allstep.train.step.execution import applied


def capture(job: Job) -> Snapshot:
    """Return a snapshot of the run.

    The tensors are those of the run, not copies: a caller that keeps them must copy them.
    """
    state = job.trainer.optimizer.state_dict()
    tensors, numbers = optimizer_state.flatten(state, parameter_names(state))
    plain: dict[str, Any] = {
        "standing": job.progress.to_plain(),
        "optimizer": numbers,
        "loader": {**job.loaders["train"].state_dict(), "position": job.progress.samples},
        "precision": job.trainer.precision.state(),
        "growth": job.growth.state(),
        "watch": asdict(job.watch),
        "execution": job.execution,
        "pictures": job.splits.image_facts(),
        "model": job.config.model.model_dump(mode="json"),
    }
    if job.ema is not None:
        tensors |= {f"{name}{EMA_SUFFIX}": tensor for name, tensor in job.ema.tensors().items()}
        plain["ema"] = {"updates": job.ema.updates}
    if job.noise is not None:
        plain["noise"] = asdict(job.noise)
    return Snapshot(job.progress.samples, job.trainer.model.state_dict(), tensors, plain)


def load(job: Job, snapshot: Snapshot) -> None:
    """Load the state of another worker of the same run into `job`. `place` must follow."""
    state, trainer = snapshot.state, job.trainer
    if job.execution != state["execution"]:
        job.execution = str(state["execution"])
        for model in (trainer.model, job.evaluated_model):
            applied(model, job.execution)
    if trainer.precision.name != state["precision"]["name"]:
        trainer.precision = Precision(state["precision"]["name"], trainer.precision.device)
    trainer.precision.load(state["precision"])
    load_weights(trainer.model, snapshot.weights)
    load_optimizer(trainer.optimizer, snapshot)
    job.progress = RunProgress.from_plain(state["standing"], trainer.task)
    job.growth.load(state["growth"])
    job.watch = LossWatch(**state["watch"])
    if job.ema is not None:
        job.ema.load(averaged_weights(snapshot), state["ema"]["updates"])
    if job.noise is not None:
        job.noise = RunningNoiseScale(**state["noise"])
