"""A batch that grows during the run, where others let the rate fall (Smith et al. 2018,
https://arxiv.org/abs/1711.00489).

The noise of an update goes with rate / batch: twice the batch calms a run as half the rate does, in
half as many updates.

```
batch |          ______ 512        growth.at=[10, 20] growth.factor=2, or growth.by_noise=true
      |    ______| 256
      |____| 128
rate  |________________            schedule.shape=constant: where it would have fallen, it stays
      +----+-----+------+-> epochs
      0    10    20     30
```

**With the schedule.** The rate is a function of the samples seen alone, scaled once, to the batch
at the beginning: it does not follow a batch that grows. So what grows here must not fall there:

* `constant`: the batch does all of it. What the paper did with ResNet-50: factor 10 where the rate
  would have fallen by 0.1.
* `step` with `schedule.milestones`: the batch grows at `growth.at` until it is at `growth.max`, the
  rate falls at the milestones after that. (Without milestones the shape has three of its own, at
  1/3, 2/3 and 8/9 of the run.)
* all others fall by themselves. The batch then grows in addition, and the run is calm sooner than
  either would make it; `note` says so.

**By noise.** With `growth.by_noise` the batch is multiplied when the gradient noise scale is surely
above it, that is, when the lower end of its 95% interval is; at most once in half an epoch, so that
the estimate can follow. The estimate depends on how samples are spread over workers, so unlike
growth at given epochs this is not the same for any number of workers.

**Memory.** A larger share of a worker is computed in more pieces of the same size (accumulation),
so it needs no more memory. Where there is room for larger pieces, there are fewer of them, but
never fewer than `accumulation` says. How much room there is, is found out once, when the run
begins, and stands in its checkpoints (`room`). The number of pieces changes nothing but rounding
and the draws of dropout.
"""

import math
from collections.abc import Mapping
from typing import Any

from allstep.optim.noise_scale import Running
from allstep.train.config.number_types import MAX_BATCH
from allstep.train.config.run_config import GrowthConfig, ResolvedConfig

_SURE_AFTER = 30  # steps: the interval supposes that many


class Growth:
    """The batch of every update. `base_batch`: at the beginning. `num_samples`: of an epoch.

    room: samples that a worker may compute at once, where those are more than at the beginning; see
    the module of that name.
    """

    def __init__(
        self, section: GrowthConfig, base_batch: int, num_samples: int, room: int = 0
    ) -> None:
        self._section = section
        self._base = base_batch
        self._num_samples = num_samples
        self._room = room
        self._times = 0  # it has grown by noise
        self._last = 0  # at that sample

    def batch(self, samples: int, noise: Running | None = None) -> int:
        """The batch of the update after `samples` samples; noise: what was measured until then."""
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
        """The batch that has grown so many times; never above `most`, nor above all samples there
        are."""
        most = min(self._section.max or self._num_samples, max(self._num_samples, self._base))
        grown: int = self._base * self._section.factor**times
        return min(grown, most)

    def num_micro_batches(self, batch: int, world_size: int, base: int) -> int:
        """In how many pieces a worker computes its share of `batch`, when at the beginning there
        were `base` of them."""
        first, share = (
            math.ceil(math.ceil(self._base / world_size) / base),
            math.ceil(batch / world_size),
        )
        return max(min(base, share), math.ceil(share / max(first, self._room)))

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"times": self._times, "last": self._last, "room": self._room}

    def load(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self._times, self._last = int(state["times"]), int(state["last"])
        self._room = int(state.get("room", 0))  # runs of before had none


def grows(config: ResolvedConfig) -> bool:
    """Whether the batch of that run may grow."""
    return bool(config.growth.at) or config.growth.by_noise


def batches(config: ResolvedConfig, num_samples: int | None = None) -> tuple[int, int]:
    """Return the smallest and the largest batch that the run may have.

    num_samples: of an epoch, where that is known; a batch does not grow beyond it.
    """
    base = config.batch
    if not grows(config):
        return base, base
    most = config.growth.max or num_samples or MAX_BATCH
    # A batch that is larger than the set from the beginning is cut down to it when it would grow.
    return min(base, most), max(base, most)


def note(config: ResolvedConfig) -> str | None:
    """What the user should know about growth and schedule together."""
    schedule = config.schedule
    if (
        not grows(config)
        or schedule.shape == "constant"
        or (schedule.shape == "step" and schedule.milestones)
    ):
        return None
    return (
        f"the batch grows, and with schedule.shape={schedule.shape} the rate falls as well:"
        " schedule.shape=constant leaves it to the batch, schedule.shape=step with"
        " schedule.milestones says when each of them does its part"
    )
