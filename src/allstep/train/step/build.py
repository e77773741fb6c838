"""Build the model and the optimizer of a run from its config.

The order matters: weights are equal on all ranks (drawn from the seed, or from a checkpoint) before
the optimizer is created, and the optimizer has its state before it is distributed over the ranks.
"""

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from allstep import norm, optim
from allstep.comm.group.init import at_shutdown, group_for, host_group_for, num_hosts
from allstep.comm.group.process_group import AllstepGroup
from allstep.compression import Codec
from allstep.data import Batch
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError
from allstep.models.by_name import make_model
from allstep.models.norms import make_norm
from allstep.optim import groups, noise_variance
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.parallel.updates import Averaging, ByOwners, Update
from allstep.parallel.updates.outer_step import PLAIN, outer_step
from allstep.train.config.run_config import OptimizerConfig, ResolvedConfig, RunConfig
from allstep.train.step.learning_rate import peak_lr
from allstep.world import World

SHARE_FROM_BYTES = 100_000_000
"""Weights of at least this size are shared by the workers of a host, which is faster from there on
(docs/measured.md)."""


# Numbers the optimizers of this process, in the same order on all ranks, to give each unique names.
_NUMBERS = count()


def make_device(config: RunConfig) -> torch.device:
    """Return the device on which this rank computes. `comm.init` has selected its GPU before."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("unreachable: run.prepare checks the device first")
    use_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


class ImageFacts(Protocol):
    """The facts about the data that determine the shape of a model."""

    @property
    def num_classes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...


def build_model(config: RunConfig, facts: ImageFacts) -> nn.Module:
    """Return the model with its initial weights, which depend only on the config's seed."""
    torch.manual_seed(config.seed)
    section = config.model
    kind = "batch" if section.norm in ("sync", "ghost") else section.norm
    model = make_model(
        section.name,
        num_classes=facts.num_classes,
        shape=facts.shape,
        norm=make_norm(kind, momentum=section.norm_momentum, scale=section.norm_scale),
        options=dict(section.options),
    )
    if section.norm == "sync":
        return norm.convert(model, sync=True)
    if section.norm == "ghost":
        norm.convert(model, ghost=section.ghost)
        for layer in model.modules():
            if isinstance(layer, norm.GhostBatchNorm):
                # `config.check` has checked the batch, and a resumed run may begin with the short
                # batch at the end of an epoch.
                layer.looked = True
    return model


def make_optimizer(config: ResolvedConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the whole model for this rank alone.

    Biases and norms are a parameter group of their own, with their own learning rate.
    """
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    section = config.optimizer
    both = (
        groups(named, exempt=lambda name, parameter: False) if section.decay_all else groups(named)
    )
    for group in both:
        group["rate_factor"] = section.bias_lr if group["exempt"] else 1.0
    return _MAKERS[section.name](both, peak_lr(config), section)


def _sgd(params: Any, lr: float, section: OptimizerConfig) -> torch.optim.Optimizer:
    momentum, decay = section.momentum, section.weight_decay
    return torch.optim.SGD(
        params, lr, momentum=momentum, nesterov=_nesterov(section), weight_decay=decay
    )


def _nesterov(section: OptimizerConfig) -> bool:
    """Return whether to use Nesterov momentum: it is the default, but needs a momentum above 0."""
    return section.nesterov and section.momentum > 0


def _layerwise(
    kind: type[optim.LARS],
) -> Callable[[Any, float, OptimizerConfig], torch.optim.Optimizer]:
    def make(params: Any, lr: float, section: OptimizerConfig) -> torch.optim.Optimizer:
        own = _given(trust_coefficient=section.trust_coefficient)
        return kind(params, lr, section.momentum, section.weight_decay, _nesterov(section), **own)

    return make


def _adaptive(kind: Any) -> Callable[[Any, float, OptimizerConfig], torch.optim.Optimizer]:
    def make(params: Any, lr: float, section: OptimizerConfig) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(
            params, lr, weight_decay=section.weight_decay, **_given(betas=section.betas)
        )
        return made

    return make


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that the user set; the optimizer has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


_MAKERS: dict[str, Callable[[Any, float, OptimizerConfig], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adaptive(torch.optim.AdamW),
    "lars": _layerwise(optim.LARS),
    "larc": _layerwise(optim.LARC),
    "lamb": _adaptive(optim.LAMB),
    "novograd": _adaptive(optim.NovoGrad),
}


def shares_weights(
    config: RunConfig,
    world: World,
    model: nn.Module,
    device: torch.device,
    is_elastic: bool = False,
) -> bool:
    """Return whether the workers of a host share one copy of the weights.

    With `sync=server` they do, since the owner of a slice is its server, and with `sync.compress`,
    since the owner of a range encodes it. In an elastic run only if
    requested, because each update then makes an undo copy; a world of one worker shares nothing,
    but the next one may be larger.
    """
    mode = config.sync.mode
    if mode.name == "server":
        return world.size > 1 or is_elastic
    if mode.averages_weights or not mode.has_equal_steps:
        return False
    if config.sync.compresses:
        if device.type != "cpu":
            raise ConfigError(
                f"sync.compress={config.sync.compress} works on CPUs only so far, and this run"
                f" computes on {device.type}: set device=cpu, or omit sync.compress"
            )
        return True
    if config.share_weights is True and config.precision == "float16":
        raise ConfigError(
            "share_weights=true and precision=float16 exclude each other: float16 needs whole"
            " gradients to detect an overflow; change one of them"
        )
    if is_elastic:
        return config.share_weights is True
    if config.share_weights != "auto":
        return bool(config.share_weights) and world.size > 1
    one_host = 1 < world.size == world.local_size
    # Loss scaling and gradient noise need the whole gradient on each rank.
    whole_gradients = config.precision == "float16" or config.optimizer.noise > 0
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    return one_host and device.type == "cpu" and not whole_gradients and nbytes >= SHARE_FROM_BYTES


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    num_micro_batches: int,
    share: bool,
    is_elastic: bool = False,
    averaging: Averaging | None = None,
    serves: bool = False,
    codec: Codec | None = None,
) -> ReplicatedOptimizer:
    """Return `optimizer` with gradients reduced over all ranks. A collective.

    `num_micro_batches` is the number of backward passes per step. `share` lets the workers of a
    host share one copy of the weights; if `is_elastic`, with an undo copy. `averaging` averages
    weights at intervals instead of gradients. `serves`: each weight has one owner in the run; in an
    elastic run one on each host, so that a lost host takes no state along. `codec`: encodes what
    hosts exchange, if weights are shared.
    """
    named = [
        Named(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    number, generation = next(_NUMBERS), world.generation
    # A worker of an elastic run may have made an optimizer before it joined, also the first world.
    is_counted = generation == 0 and not is_elastic
    key = f"train/{number}" if is_counted else f"train/generation {generation}"
    replicas = Replicas(
        named,
        lambda: group_for("gradients"),
        lambda: key,
        Rule(densify=True),
        num_micro_batches,
        overlap=False if share else None,
    )
    update: Update | None = averaging
    if share:
        one_in_run = serves and not is_elastic
        update = ByOwners(type(optimizer), is_elastic, one_in_run, codec)
    made = replicate(optimizer, replicas, world.size, update)
    at_shutdown(made.close)
    return made


def make_averaging(
    config: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer, is_elastic: bool = False
) -> Averaging | None:
    """Return the update that averages weights, if that is the mode of the run.

    Buffers are averaged with the small sum of a round (`running_statistics`). If `is_elastic`, a
    round can be undone.
    """
    section, mode = config.sync, config.sync.mode
    if mode.name not in ("local", "diloco"):
        return None
    outer = outer_step(optimizer, mode, section.outer_lr, section.outer_momentum)

    def frozen() -> list[Named]:
        named = model.named_parameters()
        return [Named(*each) for each in named if not each[1].requires_grad]

    def party() -> AllstepGroup | None:
        # Asked for in each world: after a loss there may be one host left.
        return host_group_for("gradients") if section.are_hosts(num_hosts()) else None

    return Averaging(
        outer=outer,
        also=frozen,
        is_on=not mode.from_epoch,
        keeps_undo=is_elastic,
        host_group=party,
    )


def outer_note(optimizer: ReplicatedOptimizer) -> list[str]:
    """Return a note on the outer step of `sync=diloco:H`; none in other modes."""
    update = optimizer.replica_update
    if not isinstance(update, Averaging) or update.outer == PLAIN:
        return []
    outer = update.outer
    return [f"outer step of DiLoCo: lr {outer.lr:g}, Nesterov momentum {outer.momentum:g}"]


def compress_note(config: RunConfig, is_resumed: bool) -> list[str]:
    """Return a note on what `sync.compress` does in a run."""
    if not config.sync.compresses:
        return []
    text = f"sync.compress={config.sync.compress}: the sums that hosts exchange are encoded"
    lost = "; what was not sent before the checkpoint is lost" if is_resumed else ""
    return [text + lost]


def attach(optimizer: ReplicatedOptimizer, world: World, reduces: bool = True) -> None:
    """Let a distributed optimizer reduce over the ranks of another world of an elastic run.

    Without `reduces` each rank's gradients are its own.
    """
    # Not counted, because a worker that joins has made fewer optimizers than the others.
    optimizer.attach(f"train/generation {world.generation}", world.size if reduces else 1)
    at_shutdown(optimizer.close)


def make_noise(config: ResolvedConfig) -> Callable[[int], float] | None:
    """Return a function from samples seen to the variance of gradient noise; None without noise."""
    eta, batch = config.optimizer.noise, config.batch
    return (lambda seen: float(eta / (1 + seen / batch) ** 0.55)) if eta else None


def make_weigh(config: ResolvedConfig) -> Callable[[Batch, int], Tensor] | None:
    """Return a function that draws random weights for samples; None without `noise_like`.

    The weights are drawn from (seed, epoch, sample), so they are the same with any number of
    workers. Their variance follows the size of the step's global batch, which is smaller at the end
    of an epoch and may grow during the run.
    """
    like = config.optimizer.noise_like
    if like is None:
        return None

    def weigh(batch: Batch, num_samples: int) -> Tensor:
        std = noise_variance(num_samples, like) ** 0.5
        angle, radius = Draws(config.seed, batch.epoch, batch.samples).uniform("noise_like", 2).T
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)  # Box and Muller 1958
        return torch.from_numpy(1.0 + std * normal).float()

    return weigh
