"""How the learning rate follows the batch.

A recipe's rate belongs to the batch that it was found with. With k times the samples in a batch
there are 1/k as many steps, so each step goes k times as far (linear scaling: Goyal et al. 2017,
https://arxiv.org/abs/1706.02677). Square-root scaling keeps the variance of a step instead of its
mean (Krizhevsky 2014, https://arxiv.org/abs/1404.5997; Hoffer et al. 2017,
https://arxiv.org/abs/1705.08741); it is usual for optimizers that divide by the size of the
gradient: Adam, LAMB, LARS.

**Momentum correction** (Goyal et al., remark 3). There are two ways to write momentum:

```
torch:   v = m * v + g          w = w - lr * v
others:  v = m * v + lr * g     w = w - v              (Caffe, TensorFlow, the LARS paper)
```

They are the same until the rate changes. Then the second one has the old rate in v, and must use m
* lr_now / lr_before in place of m for the step that first has the new rate. All optimizers of torch
and those here are of the first kind and need nothing.
"""

import math
from collections.abc import Callable, Mapping


def linear_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The rate for `batch` when `lr` belongs to `base_batch`: in proportion."""
    return lr * batch / base_batch


def square_root_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The rate for `batch` when `lr` belongs to `base_batch`: in proportion to the square root."""
    return lr * math.sqrt(batch / base_batch)


def no_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The rate as it is, whatever the batch."""
    return lr


SCALINGS: Mapping[str, Callable[[float, int, int], float]] = {
    "linear": linear_scaling,
    "square-root": square_root_scaling,
    "none": no_scaling,
}


def momentum_correction(momentum: float, lr: float, lr_before: float) -> float:
    """The momentum to use in the first step at a new rate, for an optimizer that has the rate
    inside its momentum; see the module."""
    return momentum * lr / lr_before if lr_before else momentum
