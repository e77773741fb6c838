"""From a run to a checkpoint.

```
weights.safetensors      the model's parameters and buffers
optimizer.safetensors    "<parameter>/<name>" of the optimizer; "<tensor>/average" of the moving average, where there is one
state.json               the standing, the optimizer's numbers, and what an image must look like for this model (classes, shape, mean, ...)
```

Nothing in it knows the time, the host or the number of workers, but for one number of a batch that
grows: how many samples a worker may compute at once. `restore` is the way back.
"""

from dataclasses import asdict
from typing import Any

from allstep.train.checkpoint import optimizer_state
from allstep.train.checkpoint.files import Snapshot
from allstep.train.checkpoint.restore import EMA_SUFFIX, parameter_names
from allstep.train.run.setup import Job


def capture(job: Job) -> Snapshot:
    """The run as it is now. The tensors are the run's own: whoever keeps them copies them."""
    state = job.trainer.optimizer.state_dict()
    tensors, numbers = optimizer_state.flatten(state, parameter_names(state))
    plain: dict[str, Any] = {
        "standing": job.standing.to_plain(),
        "optimizer": numbers,
        "loader": {**job.loaders["train"].state_dict(), "position": job.standing.samples},
        "precision": job.trainer.precision.state(),
        "growth": job.growth.state(),
        "watch": asdict(job.watch),
        "execution": job.execution,
        "pictures": job.parts.image_facts(),
        "model": job.config.model.model_dump(mode="json"),
    }
    if job.ema is not None:
        tensors |= {f"{name}{EMA_SUFFIX}": tensor for name, tensor in job.ema.tensors().items()}
        plain["ema"] = {"updates": job.ema.updates}
    if job.noise is not None:
        plain["noise"] = asdict(job.noise)
    return Snapshot(job.standing.samples, job.trainer.model.state_dict(), tensors, plain)
