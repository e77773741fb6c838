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
times as far as the parties did. That suits AdamW inside and many steps. The defaults were measured
by inner optimizer and H (docs/servers.md).
"""

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from allstep.parallel.sync_mode import SyncMode


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

# Outer momentum for few steps between two averages, and for at least `_MANY`.
_MANY = 16
_MOMENTUM = (0.5, 0.7)
_ADAPTIVE = (0.7, 0.9)


def outer_step(
    optimizer: Optimizer, mode: SyncMode, lr: float | None = None, momentum: float | None = None
) -> OuterStep:
    """Return the outer step of a mode that averages weights: plain for `local`.

    `optimizer`: the inner one, from which the defaults of `diloco` follow, with H. `lr`,
    `momentum`: settings that the user made.
    """
    if mode.name != "diloco":
        return PLAIN
    usual = _usual(optimizer, mode.number)
    return OuterStep(
        usual.lr if lr is None else lr, usual.momentum if momentum is None else momentum
    )


def _usual(optimizer: Optimizer, every: int) -> OuterStep:
    """Return the defaults for an inner optimizer and steps between two averages.

    An inner momentum and the outer one multiply the distance, the more so with few steps between
    two averages; Adam's steps do not grow with its momentum.
    """
    is_adaptive = all("betas" in group for group in optimizer.param_groups)
    momentum = _ADAPTIVE if is_adaptive else _MOMENTUM
    return OuterStep(0.7, momentum[every >= _MANY])
