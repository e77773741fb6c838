"""Puts model and optimizer of a run together, as its config says.

The order matters: weights are equal on all ranks (drawn from the seed, or from a checkpoint) before
the optimizer is made, and the optimizer has its state before it is shared out.
"""

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from allstep import norm, optim
from allstep.comm.group.init import at_shutdown, group_for
from allstep.data import Batch
from allstep.data.random.draws import Draws
from allstep.errors import ConfigError
from allstep.models.by_name import make_model
from allstep.models.norms import make_norm
from allstep.optim import groups, noise_variance
from allstep.parallel.exchange import Named, Rule
from allstep.parallel.replicas import Replicas
from allstep.parallel.replicated import ReplicatedOptimizer, replicate
from allstep.train.config.run_config import OptimizerConfig, ResolvedConfig, RunConfig
from allstep.train.step.learning_rate import peak_lr
from allstep.world import World

SHARE_FROM_BYTES = 100_000_000
"""Weights from this size on are shared by the workers of a host: there it was measured to be faster
(docs/measured.md)."""


_NUMBERS = count()  # of optimizers of this process: they tell them apart, alike on all ranks


def make_device(config: RunConfig) -> torch.device:
    """Where this rank computes; `comm.init` has chosen its GPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("unreachable: prepare looks first")
    use_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


class ImageFacts(Protocol):
    """What a model must know of the data."""

    @property
    def num_classes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...


def build_model(config: RunConfig, facts: ImageFacts) -> nn.Module:
    """The model with its first weights, which depend on the seed only."""
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
                # `config.check` has, and a resumed run may begin with the short batch at an epoch's
                # end
                layer.looked = True
    return model


def make_optimizer(config: ResolvedConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Of this rank alone, on the whole model. Biases and norms are a group of their own."""
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
    """It is our default, and means nothing without momentum."""
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
    """Those that somebody has given; the optimizer knows best what the others should be."""
    return {name: value for name, value in options.items() if value is not None}


_MAKERS: dict[str, Callable[[Any, float, OptimizerConfig], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adaptive(torch.optim.AdamW),
    "lars": _layerwise(optim.LARS),
    "larc": _layerwise(optim.LARC),
    "lamb": _adaptive(optim.LAMB),
    "novograd": _adaptive(optim.NovoGrad),
}


def shares_weights(config: RunConfig, world: World, model: nn.Module, device: torch.device) -> bool:
    """Whether the workers of a host keep one copy of the weights."""
    if config.share_weights is True and config.precision == "float16":
        raise ConfigError(
            "share_weights=true and precision=float16 exclude each other: whether a step overflowed"
            " is seen in whole gradients only"
        )
    if config.share_weights != "auto":
        return bool(config.share_weights) and world.size > 1
    one_host = 1 < world.size == world.local_size
    whole_gradients = (
        config.precision == "float16" or config.optimizer.noise > 0
    )  # what then happens to them needs all of them
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    return one_host and device.type == "cpu" and not whole_gradients and nbytes >= SHARE_FROM_BYTES


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    num_micro_batches: int,
    share: bool,
) -> ReplicatedOptimizer:
    """The optimizer, with the gradients of all ranks. All ranks together."""
    named = [
        Named(name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    replicas = Replicas(
        named,
        lambda: group_for("gradients"),
        f"train/{next(_NUMBERS)}",
        Rule(densify=True),
        num_micro_batches,
        overlap=False if share else None,
    )
    made = replicate(optimizer, replicas, world.size, share_weights=share)
    at_shutdown(made.close)
    return made


def make_noise(config: ResolvedConfig) -> Callable[[int], float] | None:
    """Variance of the noise on gradients, by samples seen."""
    eta, batch = config.optimizer.noise, config.batch
    return (lambda seen: float(eta / (1 + seen / batch) ** 0.55)) if eta else None


def make_weigh(config: ResolvedConfig) -> Callable[[Batch, int], Tensor] | None:
    """Random weights of samples, drawn from (seed, epoch, sample): the same with any number of
    workers.

    The variance follows the samples of the step's global batch, which is smaller where an epoch
    ends and may have grown.
    """
    like = config.optimizer.noise_like
    if like is None:
        return None

    def weigh(batch: Batch, num_samples: int) -> Tensor:
        deviation = noise_variance(num_samples, like) ** 0.5
        angle, radius = Draws(config.seed, batch.epoch, batch.samples).uniform("noise_like", 2).T
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)  # Box and Muller 1958
        return torch.from_numpy(1.0 + deviation * normal).float()

    return weigh
