"""The outer step: what the parties do with the mean of their weights (DiLoCo, arXiv 2311.08105).

```
d        common weights before the round - mean of the parties' weights after it
v        momentum * v + d
weights  common weights - lr * (d + momentum * v)          Nesterov
```

This is torch's `SGD(lr, momentum, nesterov=True)` with d, the "pseudo-gradient", as gradient. Plain
averaging (local SGD) is the outer step with lr 1 and momentum 0: weights = common weights - d. A
parameter that no party changed has d = 0 and keeps its bits.

In the long run momentum m multiplies the distance by 1 / (1 - m): the papers' 0.7 and 0.9 move 7
times as far as the parties did. That suits AdamW inside and hundreds of steps. `chosen` returns
defaults that were measured (docs/servers.md).
"""

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class OuterStep:
    """The settings of the outer step; the defaults are plain averaging."""

    lr: float = 1.0
    momentum: float = 0.0

    def update(self, weights: Tensor, difference: Tensor, velocity: Tensor | None) -> None:
        """Change `weights` in place, and `velocity` unless there is no momentum."""
        if velocity is None:
            weights.sub_(difference, alpha=self.lr)
            return
        velocity.mul_(self.momentum).add_(difference)
        weights.sub_(difference, alpha=self.lr).sub_(velocity, alpha=self.lr * self.momentum)


PLAIN = OuterStep()


def chosen(optimizer: Optimizer, every: int) -> OuterStep:
    """Return the default outer step of an inner optimizer, for averages every `every` steps."""
    return OuterStep(0.7, 0.5)
