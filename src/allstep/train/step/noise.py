"""The noise scale of a run under way, from what its steps leave behind.

```
several workers   own gradients, scaled as if each had its equal share of the batch   against their mean
one worker        the gradient of the first piece                                     against that of the whole batch
```
"""

import math
from collections.abc import Sequence

from allstep.comm.op.norms import GradientNorms
from allstep.optim import RunningNoiseScale, estimate, from_workers
from allstep.train.step.step import Trainer


def measure_noise(
    noise: RunningNoiseScale, trainer: Trainer, norms: GradientNorms, weights: Sequence[float]
) -> None:
    """Takes the last step into account; `weights`: samples of each rank.

    A step of float16 that is left out says nothing.
    """
    first, mean, total = trainer.first_micro_batch, norms.mean / trainer.scale**2, sum(weights)
    if not math.isfinite(mean):
        return
    if sum(each > 0 for each in weights) > 1:
        usual = (
            total / len(weights) / trainer.scale
        )  # each rank's gradient was scaled as if it had so many samples
        own = [
            norm * (usual / max(weight, 1)) ** 2
            for norm, weight in zip(norms.own, weights, strict=True)
        ]
        noise.add(from_workers(own, weights, mean))
    elif first is not None and first.samples < total:
        noise.add(estimate(first.squared, first.samples, mean, total))
