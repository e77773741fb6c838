"""Share the weights of a run between parties that push, for the asynchronous modes of `sync`."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from allstep.errors import ConfigError
from allstep.kvstore.modes.store_servers import num_started
from allstep.kvstore.training import Options, SharedModel, share_model
from allstep.parallel.replicated import ReplicatedOptimizer
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.step.build import make_optimizer

# Numbers that a party can pass to the others at once.
_NUM_VALUES = 4096


def options_of(config: ResolvedConfig, num_train: int) -> Options:
    """Return how the parties of a run train together."""
    section = config.sync
    return Options(
        section.mode,
        num_train,
        correct=section.correct,
        scale=section.scale,
        alpha=section.alpha,
        num_values=_NUM_VALUES,
    )


def share_weights(
    config: ResolvedConfig,
    model: nn.Module,
    optimizer: ReplicatedOptimizer,
    num_train: int,
) -> SharedModel:
    """Share the weights and the state of `optimizer`, those of the lowest rank. A collective."""
    wrapped = type(make_optimizer(config, model))
    # Buffers are averaged by samples, with the running statistics.
    fixed = [each.detach() for each in model.parameters() if not each.requires_grad]
    return share_model(optimizer, wrapped, options_of(config, num_train), averaged=fixed)


def unused_servers(config: ResolvedConfig) -> list[str]:
    """Return a note if `allstep run --servers` has started servers that the run does not use."""
    if not (count := num_started()):
        return []
    servers = f"{count} server{'s' if count > 1 else ''}"
    return [
        f"{servers} of --servers: not used, since sync={config.sync.name} keeps all weights in the"
        " workers; omit --servers"
    ]


def adder(shared: SharedModel) -> Callable[[Tensor], None]:
    """Return a function that adds a float64 vector over the living parties, in place.

    It needs no process group, so that a lost party does not fail it.
    """

    def add_up(vector: Tensor) -> None:
        while True:
            starts = range(0, len(vector), _NUM_VALUES)
            parts = [shared.gather(vector[start : start + _NUM_VALUES]) for start in starts]
            if len({tuple(sorted(found)) for found in parts}) <= 1:
                break
            # A party was lost between two parts, which all others know.
        vector.copy_(torch.cat([_sum(found) for found in parts]))

    return add_up


def _sum(found: Mapping[int, Tensor]) -> Tensor:
    """Return the sum in the order of the ranks."""
    return torch.stack([found[rank] for rank in sorted(found)]).sum(0)


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
