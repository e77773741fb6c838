"""Multiplicative noise: each sample's loss times a random number of mean 1 (Hoffer et al. 2017,
https://arxiv.org/abs/1705.08741).

The gradient of a batch of M samples has covariance Sigma / M. To get that of a smaller batch B from
M samples, weight each sample's gradient by z with mean 1:

```
g = 1/M * sum z_n * g_n        covariance about (1 + variance) / M * E[g g^T]
                               so: variance = M / B - 1
```

A weight on the loss is a weight on the gradient, so only the loss changes:

    variance = noise_variance(batch=4096, like=128)
    z = sample_weights(len(target), variance, generator(seed, seen, rank))
    loss = (cross_entropy(output, target, reduction="none") * z).mean()

Unlike additive noise it has the shape of the data's own noise. To draw the same weights with any
number of workers, draw for the whole batch with rank 0 and use the share of each rank.
"""

import torch
from torch import Tensor

from allstep.errors import ConfigError


def noise_variance(batch: int, like: int) -> float:
    """Return the variance of sample weights that gives a batch the noise of a smaller one.

    `batch`: samples of the batch. `like`: samples of the smaller batch. 0 if it is not smaller.
    """
    if batch < 1 or like < 1:
        raise ConfigError(
            f"a batch of {batch} with the noise of one of {like}: both must be at least 1"
        )
    return max(0.0, batch / like - 1)


def sample_weights(count: int, variance: float, generator: torch.Generator) -> Tensor:
    """Return a weight for each of `count` samples, from N(1, variance).

    Some weights are negative, on purpose. `generator`: the source of the random numbers; the
    weights are on its device.
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
