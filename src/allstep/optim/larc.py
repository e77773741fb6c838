"""LARC: LARS that never exceeds the given learning rate (layer-wise adaptive rate clipping,
NVIDIA's variant of LARS).

LARS scales a layer's learning rate up as well as down. LARC takes the smaller of the two, so that
the given learning rate is an upper limit that schedules and warm-up can set, and layers that
tolerate it learn with plain SGD. For global learning rate gamma, coefficient eta, decay d:

```
lambda = min(gamma, eta * |w| / (|g| + d * |w|))        the layer's learning rate; gamma if |w| or
                                                        the denominator is 0
v      = m * v + lambda / gamma * (g + d * w)
w      = w - gamma * v
```

`trust_ratios` returns the factor lambda / gamma: 1 means that the layer is not slowed down. The
default coefficient, 0.02, is that of NVIDIA's own implementation (apex). Learning rates are those
of SGD, not those of LARS: they are not multiplied by eta.

Errors of other implementations: a division by a learning rate of 0 (the first step of a warm-up
from 0) puts NaN into the momentum; here the factor is then 1. And a ratio of 1 for weights of 0
that is then also divided by the learning rate: with 2, such a layer would learn at half of it.
"""

from typing import Any

import torch
from torch import Tensor

from allstep.optim.lars import LARS
from allstep.optim.layerwise import Group


class LARC(LARS):
    """SGD whose learning rate is scaled down layer by layer, never up; see the module.

    Arguments as for LARS. `trust_coefficient`: the largest fraction of its norm by which a step
    may change a layer (default: 0.02). `maximize`: ascend instead of descend. `exempt`: whether
    layers are neither scaled nor decayed; None (default): those with fewer than two dimensions.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        trust_coefficient: float = 0.02,
        maximize: bool = False,
        exempt: bool | None = None,
    ) -> None:
        more: dict[str, Any] = {
            "trust_coefficient": trust_coefficient,
            "maximize": maximize,
            "exempt": exempt,
        }
        super().__init__(params, lr, momentum, weight_decay, nesterov, **more)

    def _bounded(self, ratios: Tensor, group: Group) -> Tensor:
        lr: float = group["lr"]
        return (ratios / lr).clamp_(max=1.0) if lr > 0 else torch.ones_like(ratios)
