"""The weights of the workers' shares at the start of a run, or of a new world of an elastic run.

```
even      equal weights
speed     equal weights; the rule of `step.speed_rule` changes them
[3, 1]    these, if there are as many workers; equal weights after an elastic run lost or got one
```

They are not part of a checkpoint: the position of a run does not depend on them.
"""

from allstep.data.order import Weights, even
from allstep.train.config.number_types import Shares


def initial_weights(shares: Shares, size: int) -> Weights:
    """Return the first weights of `size` workers for the config key `shares`."""
    return even(size) if replaced(shares, size) or isinstance(shares, str) else shares


def replaced(shares: Shares, size: int) -> str:
    """Return why `size` workers have even shares instead of the config's numbers, or ""."""
    if isinstance(shares, str) or len(shares) == size:
        return ""
    return f"shares={list(shares)} is for {len(shares)} workers: {size} workers have even shares"
