"""Estimates of the gradient noise scale from the steps of a run.

```
several workers   compare the gradient of each worker, scaled as if its share of the batch were an
                  equal one, with the mean of all gradients
one worker        compares the gradient of the first micro-batch with that of the whole batch
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
    """Add the last step to the estimate `noise`.

    `norms` has the squared norms of the gradients, `weights` the number of samples of each rank. A
    step that float16 skipped after an overflow is ignored.
    """
    first, mean, total = trainer.first_micro_batch, norms.mean / trainer.scale**2, sum(weights)
    if not math.isfinite(mean):
        return
    if sum(each > 0 for each in weights) > 1:
        # Each rank's gradient was scaled as if the rank had this many samples.
        usual = total / len(weights) / trainer.scale
        pairs = zip(norms.own, weights, strict=True)
        own = [norm * (usual / max(weight, 1)) ** 2 for norm, weight in pairs]
        noise.add(from_workers(own, weights, mean))
    elif first is not None and first.samples < total:
        noise.add(estimate(first.squared, first.samples, mean, total))
