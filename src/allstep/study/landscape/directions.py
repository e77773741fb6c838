"""Random directions around trained weights, with the norm of each filter.

Li et al. 2018, https://arxiv.org/abs/1712.09913: a direction is Gaussian, and each of its filters
is scaled to the norm of the model's filter, because a network with ReLUs computes the same after
one layer is multiplied and the next one divided. In plain directions, larger weights would look
flatter.

```
tensor of a layer   filter i = row i of the output dimension         direction
(64, 32, 5, 5)      (32, 5, 5)       64 of them     g_i x |w_i| / |g_i|,   g_i Gaussian
(10, 128)           (128,)           10 of them     the same for linear layers
(64,)               biases, scales and shifts of norms               zero
```

The numbers g_i depend on (seed, number of the direction, name of the tensor, i) and on nothing
else: not on the worker, nor on the order in which they are drawn (`data.random.draws`).
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from allstep.data.random.draws import Draws, Floats

# Numbers that are drawn at a time, which bounds the memory: some arrays of 8 MB.
_AT_ONCE = 1 << 20
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def filter_dimensions(model: nn.Module) -> dict[str, int]:
    """Return the tensors that a direction moves, each with the dimension of its filters.

    They are the trained parameters of at least two dimensions. The filters of a transposed
    convolution are in its second dimension.
    """
    transposed = {id(layer.weight) for layer in model.modules() if isinstance(layer, _TRANSPOSED)}
    return {
        name: int(id(parameter) in transposed)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.ndim > 1
    }


def direction(
    weights: Mapping[str, Tensor], dimensions: Mapping[str, int], seed: int, number: int
) -> dict[str, Tensor]:
    """Return the direction with this `number` around `weights`, for each tensor in `dimensions`."""
    return {
        name: _of_tensor(weights[name], dimension, seed, f"landscape {number} {name}")
        for name, dimension in dimensions.items()
    }


def _of_tensor(weight: Tensor, dimension: int, seed: int, stream: str) -> Tensor:
    """Return the direction of one tensor, in the memory layout of the tensor."""
    filters = weight.detach().movedim(dimension, 0)
    rows = filters.reshape(len(filters), -1).cpu().double().numpy()
    made = np.empty_like(rows)
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for begin in range(0, len(rows), step):
        numbers = np.arange(begin, min(begin + step, len(rows)))
        made[numbers] = _scaled(normals(seed, stream, numbers, rows.shape[1]), rows[numbers])
    shaped = torch.from_numpy(made).reshape(filters.shape).movedim(0, dimension)
    return torch.empty_like(weight).copy_(shaped)


def normals(
    seed: int, stream: str, filters: np.ndarray[tuple[int], np.dtype[np.int64]], count: int
) -> Floats:
    """Return `count` normal numbers for each of the `filters`, shape (filters, count).

    Pairs of uniform numbers become pairs of normal ones (Box and Muller 1958).
    """
    pairs = -(-count // 2)
    uniform = Draws(seed, 0, filters).lasting(stream, 2 * pairs)
    radius = np.sqrt(-2 * np.log1p(-uniform[:, :pairs]))
    angle = 2 * math.pi * uniform[:, pairs:]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), 1)[:, :count]


def _scaled(drawn: Floats, like: Floats) -> Floats:
    """Return the rows of `drawn` with the norms of the rows of `like`."""
    norms = np.linalg.norm(drawn, axis=1, keepdims=True)
    target = np.linalg.norm(like, axis=1, keepdims=True)
    scaled: Floats = drawn * (target / np.maximum(norms, np.finfo(np.float64).tiny))
    return scaled
