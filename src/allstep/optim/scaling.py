"""How the learning rate follows the batch.

A recipe's rate belongs to the batch that it was found with. With k times the samples in a batch there are 1/k as many steps, so each
step goes k times as far (linear scaling: Goyal et al. 2017, https://arxiv.org/abs/1706.02677).
"""

from collections.abc import Callable, Mapping


def linear_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The rate for `batch` when `lr` belongs to `base_batch`: in proportion."""
    return lr * batch / base_batch


def no_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The rate as it is, whatever the batch."""
    return lr


SCALINGS: Mapping[str, Callable[[float, int, int], float]] = {"linear": linear_scaling, "none": no_scaling}
