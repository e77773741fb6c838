"""Multiplicative noise: each sample's loss times a random number of mean 1 (Hoffer et al. 2017,
https://arxiv.org/abs/1705.08741).

The gradient of a batch of M samples has covariance Sigma / M. To have that of a smaller batch B
while M samples are computed, weight each sample's gradient by z with mean 1:

```
g = 1/M * sum z_n * g_n        covariance (1 + variance) / M * E[g g^T], about      so: variance = M / B - 1
```

A weight on the loss is a weight on the gradient, so nothing but the loss changes:

    z = sample_weights(len(target), noise_variance(batch=4096, like=128), generator(seed, seen,
    rank)) loss = (cross_entropy(output, target, reduction="none") * z).mean()

Unlike additive noise it has the shape of the data's own. To draw the same on any number of workers,
draw for the whole batch with rank 0 and take your share.
"""

import torch
from torch import Tensor

from allstep.errors import ConfigError


def noise_variance(batch: int, like: int) -> float:
    """The variance of weights by which a batch has the noise of a smaller one; 0 when it is not
    smaller."""
    if batch < 1 or like < 1:
        raise ConfigError(
            f"a batch of {batch} with the noise of one of {like}: both must be at least 1"
        )
    return max(0.0, batch / like - 1)


def sample_weights(count: int, variance: float, generator: torch.Generator) -> Tensor:
    """A weight for each of `count` samples, from N(1, variance).

    Some are negative; that is meant.
    """
    if variance < 0:
        raise ConfigError(
            f"a variance of {variance} for weights of samples: it must not be below 0"
        )
    return (
        torch.randn(count, generator=generator, device=generator.device)
        .mul_(variance**0.5)
        .add_(1.0)
    )
