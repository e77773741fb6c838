"""Norm layers by name, as factories from a number of channels to a layer.

| name | statistics of | |
|---|---|---|
| none | | does not change the activations |
| group | groups of channels of one sample | N workers compute the same as one |
| batch | the samples of one worker | torch's batch norm |

`allstep.norm.convert` turns batch norms into norms over all workers or over ghost batches.
"""

from collections.abc import Callable, Mapping

from torch import nn

from allstep.errors import ConfigError, did_you_mean

Norm = Callable[[int], nn.Module]
"""A factory that makes the norm layer for a number of channels."""


def no_norm(channels: int) -> nn.Module:
    """Return a layer that does not change the activations."""
    return nn.Identity()


def group_norm(channels: int) -> nn.Module:
    """Return a group norm with up to 8 groups.

    Wu and He 2018, https://arxiv.org/abs/1803.08494.
    """
    groups = next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
    return nn.GroupNorm(groups, channels)


def batch_norm(momentum: float = 0.1, *, scale: bool = True) -> Norm:
    """Return a factory of batch norms.

    `momentum` is the weight of a batch in the running statistics. Without `scale` the norms only
    shift: their weight stays at 1 and is not trained.
    """

    def made(channels: int) -> nn.Module:
        norm = nn.BatchNorm2d(channels, eps=1e-5, momentum=momentum)
        norm.weight.requires_grad_(scale)
        return norm

    return made


NORMS: Mapping[str, Norm] = {"none": no_norm, "group": group_norm}
"""Norms that process each sample independently of the others, by name."""


def make_norm(kind: str, momentum: float = 0.1, scale: bool = True) -> Norm:
    """Return the factory of the norm called `kind`: "none", "group" or "batch".

    `momentum` (of the running statistics) and `scale` (whether a scale is trained) apply to batch
    norms only.
    """
    if kind == "batch":
        return batch_norm(momentum, scale=scale)
    if kind not in NORMS:
        raise ConfigError(f"no norm is called {kind!r}; {did_you_mean(kind, [*NORMS, 'batch'])}")
    return NORMS[kind]
