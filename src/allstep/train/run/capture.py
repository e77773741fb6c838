"""Capture the state of a run for a checkpoint.

```
weights.safetensors      the model's parameters and buffers
optimizer.safetensors    "<parameter>/<name>" of the optimizer; "<tensor>/average" of the EMA, if
                         the run has one
state.json               the progress of the run (key "standing"), the optimizer's numbers, and the
                         images that the model takes (classes, shape, mean, ...)
```

A checkpoint does not depend on the time, the host or the number of workers, with one exception: for
a growing batch it stores the number of samples that a worker can compute at once. `restore` is the
inverse.
"""

from dataclasses import asdict
from typing import Any

from allstep.train.checkpoint import optimizer_state
from allstep.train.checkpoint.restore import EMA_SUFFIX, parameter_names
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.run.setup import Job


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
