"""Squared norms of gradients, taken while the gradients pass by.

```
own    before they are added: each rank all of its own gradient         | rank 0: all | rank 1: all |
mean   after: each rank a part, so that all parts are the whole         | rank 0: a half | rank 1: the other half |
```

On one host this is no further pass over the memory: a block is squared right before it is staged or
right after it was added, when it is in the cache anyway. Between hosts, through Gloo and on GPUs
what was or will be sent is read once more. At the end one small sum brings the parts together and
gives every rank the same figures.

Squares are added in the gradient's own precision within a block, and in float64 from there on: in
float32 those of 60 million elements at once are off by 0.3%, so they are by some 1e-6 (2e-4 at
worst, when all elements are equal; torch's own norm has 4e-4 there).
"""

from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 1 << 18  # elements
_PLAIN = (torch.float32, torch.float64)


class Wanted(NamedTuple):
    """What is to be measured. The same on all ranks. own: implies mean."""

    own: bool = False
    mean: bool = False


NOTHING = Wanted()


class GradientNorms(NamedTuple):
    """Squared L2 norms of one step's gradients, the same on all ranks.

    Not finite when a gradient is not.
    """

    own: tuple[float, ...]
    """By rank: of the rank's own gradient, 0 for a rank without samples.

    Empty when only the mean was measured.
    """
    weights: tuple[float, ...]
    """By rank: the samples behind its gradient; 1 for each when none was told, 0 for a rank that
    has joined."""
    mean: float
    """Of the reduced gradient, which is the mean over all samples."""


class Squares:
    """The sum of the squares of all that it is shown."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, flat: Tensor, share: float = 1.0) -> None:
        """flat: contiguous, one dimension. share: how much of it counts, where several ranks show
        the same."""
        if (
            flat.numel() > _BLOCK and flat.device.type == "cpu"
        ):  # a GPU adds up in many parts by itself
            for block in torch.split(flat, _BLOCK):
                self.add(block, share)
            return
        exact = (
            flat if flat.dtype in _PLAIN else flat.float()
        )  # the square of a half overflows above 256
        square = torch.dot(exact, exact)
        self._parts.append(square if share == 1.0 else square * share)

    def total(self) -> float:
        """So far. Waits for the device where there is one."""
        return sum(part.item() for part in self._parts)


def share_of(flat: Tensor, index: int, count: int) -> Tensor:
    """The part of a flat tensor that falls to one of `count`."""
    numel = flat.numel()
    return flat[numel * index // count : numel * (index + 1) // count]


def values_of(gradient: Tensor) -> Tensor:
    """All elements in one dimension, in any order; of a sparse gradient those that are there."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    return gradient.detach().reshape(-1)
