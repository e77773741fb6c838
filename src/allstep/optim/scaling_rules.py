"""How the learning rate depends on the batch.

A recipe's learning rate belongs to the batch that it was chosen for. With k times the samples in a
batch there are 1/k as many steps, so each step is k times as long (linear scaling: Goyal et al.
2017, https://arxiv.org/abs/1706.02677). Square-root scaling keeps the variance of a step instead of
its mean (Krizhevsky 2014, https://arxiv.org/abs/1404.5997; Hoffer et al. 2017,
https://arxiv.org/abs/1705.08741); it is usual for optimizers that divide by the size of the
gradient: Adam, LAMB, LARS.

**Momentum correction** (Goyal et al., remark 3). There are two forms of momentum:

```
torch:   v = m * v + g          w = w - lr * v
others:  v = m * v + lr * g     w = w - v              (Caffe, TensorFlow, the LARS paper)
```

They are the same until the learning rate changes. Then the second one has the old learning rate in
v, and must use m * lr_now / lr_before instead of m for the first step with the new one. All
optimizers of torch and of this package have the first form and need no correction.
"""

import math
from collections.abc import Callable, Mapping


def linear_scaling(lr: float, batch: int, base_batch: int) -> float:
    """Return the learning rate for `batch`, in proportion to the batch.

    `lr` belongs to `base_batch`.
    """
    return lr * batch / base_batch


def square_root_scaling(lr: float, batch: int, base_batch: int) -> float:
    """Return the learning rate for `batch`, in proportion to the square root of the batch.

    `lr` belongs to `base_batch`.
    """
    return lr * math.sqrt(batch / base_batch)


def no_scaling(lr: float, batch: int, base_batch: int) -> float:
    """Return `lr` for any `batch`, without regard to `base_batch`."""
    return lr


SCALINGS: Mapping[str, Callable[[float, int, int], float]] = {
    "linear": linear_scaling,
    "square-root": square_root_scaling,
    "none": no_scaling,
}


def momentum_correction(momentum: float, lr: float, lr_before: float) -> float:
    """Return the momentum for the first step at a new learning rate.

    For an optimizer that has the learning rate inside its momentum; see the module. `lr`,
    `lr_before`: new and previous learning rate.
    """
    return momentum * lr / lr_before if lr_before else momentum
