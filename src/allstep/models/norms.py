"""Norm layers by name, as factories from a number of channels to a layer.

| name | statistics of | |
|---|---|---|
| none | | leaves the activations as they are |
| group | groups of channels of one sample | N workers compute what one would |
| batch | the samples of one worker | torch's own; `allstep.norm.convert` makes one over all workers of it, or over ghost batches |
"""

from collections.abc import Callable, Mapping

from torch import nn

from allstep.errors import ConfigError, did_you_mean

Norm = Callable[[int], nn.Module]


def no_norm(channels: int) -> nn.Module:
    """Leaves the activations as they are."""
    return nn.Identity()


def group_norm(channels: int) -> nn.Module:
    """Group normalisation (Wu and He 2018, https://arxiv.org/abs/1803.08494) with up to 8 groups."""
    groups = next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
    return nn.GroupNorm(groups, channels)


def batch_norm(momentum: float = 0.1, *, scale: bool = True) -> Norm:
    """A factory of batch norms.

    Without `scale` they only shift: the weight stays at 1 and is not trained.
    """

    def made(channels: int) -> nn.Module:
        norm = nn.BatchNorm2d(channels, eps=1e-5, momentum=momentum)
        norm.weight.requires_grad_(scale)
        return norm

    return made


NORMS: Mapping[str, Norm] = {"none": no_norm, "group": group_norm}
"""Those that treat each sample by itself."""


def make_norm(kind: str, momentum: float = 0.1, scale: bool = True) -> Norm:
    """The norm called `kind`. `momentum` (of running statistics) and `scale` are a batch norm's."""
    if kind == "batch":
        return batch_norm(momentum, scale=scale)
    if kind not in NORMS:
        raise ConfigError(f"no norm is called {kind!r}; {did_you_mean(kind, [*NORMS, 'batch'])}")
    return NORMS[kind]
