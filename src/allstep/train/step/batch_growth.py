"""A batch that grows during the run, instead of a learning rate that falls.

Smith et al. 2018, https://arxiv.org/abs/1711.00489: the noise of an update is proportional to
learning rate / batch. Doubling the batch reduces it as much as halving the learning rate, in half
as many updates.

```
batch |          ______ 512        growth.at=[10, 20] growth.factor=2, or growth.by_noise=true
      |    ______| 256
      |____| 128
lr    |________________            schedule.shape=constant: the learning rate does not fall
      +----+-----+------+-> epochs
      0    10    20     30
```

**With the schedule.** The learning rate is a function of the samples seen. It is scaled once, to
the initial batch, and does not follow a batch that grows. So the batch should grow only where the
learning rate does not fall:

* `constant`: only the batch changes. The paper did this with ResNet-50: the batch grows by 10 where
  the learning rate would have fallen by 0.1.
* `step` with `schedule.milestones`: the batch grows at `growth.at` up to `growth.max`, and the
  learning rate falls at the milestones after that. (Without `schedule.milestones` the shape has
  three, at 1/3, 2/3 and 8/9 of the run.)
* All other shapes fall throughout the run. The batch grows in addition, and the noise falls faster
  than by either alone; `note` warns about it.

**By noise.** With `growth.by_noise` the batch is multiplied when the gradient noise scale is surely
above it, that is, when the lower end of its 95% interval is. This happens at most once in half an
epoch, so that the estimate can follow. The estimate depends on how samples are distributed over
workers, so unlike growth at given epochs this is not the same for any number of workers.

**Memory.** A worker computes a larger share in more micro-batches of the same size (accumulation),
so it needs no more memory. If memory has room for larger micro-batches, there are fewer of them,
but never fewer than `accumulation`. The room is measured once, when the run starts, and stored in
its checkpoints (`room`). The number of micro-batches affects only rounding and the random numbers
of dropout.
"""

import math
from collections.abc import Mapping
from typing import Any

from allstep.data.order import Weights, lengths
from allstep.optim.noise_scale import Running
from allstep.train.config.number_types import MAX_BATCH
from allstep.train.config.run_config import GrowthConfig, ResolvedConfig

# Steps; the 95% interval of the noise scale assumes at least this many.
_SURE_AFTER = 30


class Growth:
    """The batch of every update.

    `base_batch` is the batch at the start of the run, `num_samples` the samples of an epoch. `room`
    is the largest micro-batch that fits into the memory of a worker, if it is larger than at the
    start of the run (module `micro_batch`); 0 keeps the size.
    """

    def __init__(
        self, section: GrowthConfig, base_batch: int, num_samples: int, room: int = 0
    ) -> None:
        self._section = section
        self._base = base_batch
        self._num_samples = num_samples
        self._room = room
        # How often the batch has grown by noise, and after how many samples it last did.
        self._times = 0
        self._last = 0

    def batch(self, samples: int, noise: Running | None = None) -> int:
        """Return the batch of the next update, after `samples` samples.

        `noise` is the noise scale measured so far; only growth by noise uses it.
        """
        if self._section.by_noise:
            self._grow_by_noise(samples, noise)
            return self._after(self._times)
        return self._after(sum(epoch * self._num_samples <= samples for epoch in self._section.at))

    def _grow_by_noise(self, samples: int, noise: Running | None) -> None:
        batch = self._after(self._times)
        if (
            noise is None
            or noise.steps < _SURE_AFTER
            or samples - self._last < self._num_samples / 2
        ):
            return
        if self._after(self._times + 1) > batch and noise.interval()[0] > batch:
            self._times += 1
            self._last = samples

    def _after(self, times: int) -> int:
        """Return the batch after it has grown `times` times.

        It does not exceed `growth.max`, nor the samples of an epoch.
        """
        most = min(self._section.max or self._num_samples, max(self._num_samples, self._base))
        grown: int = self._base * self._section.factor**times
        return min(grown, most)

    def num_micro_batches(self, batch: int, weights: Weights, base: int) -> int:
        """Return the number of micro-batches in which a worker computes its share of `batch`.

        `weights` are those of the workers' shares, of which the largest counts; `base` is the
        number of micro-batches at the start of the run.
        """
        first = math.ceil(max(lengths(self._base, weights)) / base)
        share = max(lengths(batch, weights))
        return max(min(base, share), math.ceil(share / max(first, self._room)))

    def state(self) -> dict[str, int]:
        """Return the state that a checkpoint stores."""
        return {"times": self._times, "last": self._last, "room": self._room}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._times, self._last = int(state["times"]), int(state["last"])
        # Checkpoints of older versions have no room.
        self._room = int(state.get("room", 0))


def grows(config: ResolvedConfig) -> bool:
    """Return whether the batch of the run may grow."""
    return bool(config.growth.at) or config.growth.by_noise


def batches(config: ResolvedConfig, num_samples: int | None = None) -> tuple[int, int]:
    """Return the smallest and the largest batch that the run may have.

    `num_samples` is the number of samples of an epoch, if it is known; a batch does not grow beyond
    it.
    """
    base = config.batch
    if not grows(config):
        return base, base
    most = config.growth.max or num_samples or MAX_BATCH
    # A batch that is larger than the dataset from the start is reduced to it when it would grow.
    return min(base, most), max(base, most)


def note(config: ResolvedConfig) -> str | None:
    """Return a warning if both the batch grows and the learning rate falls; else None."""
    schedule = config.schedule
    has_milestones = schedule.shape == "step" and schedule.milestones
    if not grows(config) or schedule.shape == "constant" or has_milestones:
        return None
    return (
        f"the batch grows, and with schedule.shape={schedule.shape} the learning rate falls as"
        " well: set schedule.shape=constant to change only the batch, or schedule.shape=step with"
        " schedule.milestones to choose when each of them changes"
    )
