"""Share the weights of a run between parties that push, for the asynchronous modes of `sync`."""

import torch
from torch import nn

from allstep.errors import ConfigError
from allstep.kvstore.training import Options, SharedModel, share_model
from allstep.parallel.replicated import ReplicatedOptimizer
from allstep.train.config.run_config import ResolvedConfig


def options_of(config: ResolvedConfig, num_train: int) -> Options:
    """Return how the parties of a run train together."""
    section = config.sync
    return Options(section.mode, num_train, correct=section.correct, scale=section.scale)


def share_weights(
    config: ResolvedConfig,
    model: nn.Module,
    optimizer: ReplicatedOptimizer,
    wrapped: type,
    num_train: int,
) -> SharedModel:
    """Share the weights of `optimizer`, a class on top of `wrapped`. A collective."""
    # Buffers are averaged by samples, with the running statistics.
    fixed = [each.detach() for each in model.parameters() if not each.requires_grad]
    return share_model(optimizer, wrapped, options_of(config, num_train), averaged=fixed)


def check_pushes(config: ResolvedConfig, device: torch.device, *, layers_communicate: bool) -> None:
    """Raise ConfigError if the parties cannot push on this device, or with these layers."""
    name = config.sync.name
    if device.type != "cpu":
        raise ConfigError(
            f"sync={name} is available on CPUs only so far, and this run computes on {device.type}:"
            " set device=cpu, or sync=allreduce"
        )
    if layers_communicate:
        raise ConfigError(
            f"the model has a norm over the samples of all workers (SyncBatchNorm), which do not"
            f" step together with sync={name}: use a norm over a worker's own samples, or set"
            " sync=allreduce"
        )
