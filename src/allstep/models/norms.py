"""Norm layers by name, as factories from a number of channels to a layer.

Those here treat each sample by itself, so N workers compute what one would. Norms over a batch need the workers to talk to each
other and live in `allstep.norm`.
"""

from collections.abc import Callable, Mapping

from torch import nn

Norm = Callable[[int], nn.Module]


def no_norm(channels: int) -> nn.Module:
    """Leaves the activations as they are."""
    return nn.Identity()


def group_norm(channels: int) -> nn.Module:
    """Group normalisation (Wu and He 2018, https://arxiv.org/abs/1803.08494) with up to 8 groups."""
    groups = next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
    return nn.GroupNorm(groups, channels)


NORMS: Mapping[str, Norm] = {"none": no_norm, "group": group_norm}
