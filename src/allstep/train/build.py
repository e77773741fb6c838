"""Puts the parts of a run together as its config says: loaders, net, optimizer, rate."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import allstep.torch as hvd
from allstep.data import ImageSet, Loader, order
from allstep.data.sources.arrays import ArraySource
from allstep.models import NORMS, SmallCnn
from allstep.optim import SCALINGS, SCHEDULES, warm_up
from allstep.train.config import RunConfig
from allstep.train.evaluate import ToInput
from allstep.train.loop import Trainer
from allstep.train.prepare import num_validation
from allstep.world import World

_EVAL_BATCH = 500  # samples per rank: evaluation needs no gradients, so more fit than in training


def make_loaders(config: RunConfig, images: ImageSet, world: World, out: Path) -> dict[str, Loader]:
    """The three parts: training in a new order every epoch, the others as they lie. Bad samples are listed in `out`, by part."""
    n = len(images.train)
    held_out = num_validation(config, n)
    seed = config.data.split_seed
    kept = order.kept(np.arange(n - held_out), n, held_out, seed)
    loader = partial(Loader, world=world, strict=config.data.strict, budget=config.data.budget)
    train = ArraySource(images.train.images, images.train.labels)
    test = ArraySource(images.test.images, images.test.labels)
    many = _EVAL_BATCH * world.size
    return {
        "train": loader(
            train, batch=config.global_batch, seed=config.seed, numbers=kept, quarantine=out / "quarantine.jsonl"
        ),
        "validation": loader(
            train,
            batch=many,
            seed=None,
            numbers=order.held_out(n, held_out, seed),
            quarantine=out / "quarantine-validation.jsonl",
        ),
        "test": loader(test, batch=many, seed=None, quarantine=out / "quarantine-test.jsonl"),
    }


def make_trainer(config: RunConfig, images: ImageSet, num_train: int) -> Trainer:
    """The net, with equal weights on all ranks, and what trains it for epochs of `num_train` samples."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.seed)
    norm = NORMS[config.model.norm]
    widths, hidden = config.model.widths, config.model.hidden
    net = SmallCnn(images.num_classes, images.picture_shape, widths=widths, hidden=hidden, norm=norm).to(device)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs do not know it
    return Trainer(
        net=net,
        optimizer=hvd.DistributedOptimizer(
            _optimizer(config, net), net.named_parameters(), backward_passes_per_step=config.accumulation
        ),
        rate=learning_rate(config, num_train),
        to_input=_to_input(images, device),
        accumulation=config.accumulation,
    )


def _optimizer(config: RunConfig, net: nn.Module) -> torch.optim.Optimizer:
    section = config.optimizer
    nesterov = section.nesterov and section.momentum > 0
    return torch.optim.SGD(
        net.parameters(),
        peak_rate(config),
        momentum=section.momentum,
        nesterov=nesterov,
        weight_decay=section.weight_decay,
    )


def peak_rate(config: RunConfig) -> float:
    """The highest rate of the run: the recipe's, scaled to the batch."""
    section = config.optimizer
    return SCALINGS[section.scaling](section.lr, config.global_batch, section.base_batch)


def learning_rate(config: RunConfig, num_train: int) -> Callable[[int], float]:
    """The rate by samples seen. The warm-up counts the batch to come as well: a first step at rate 0 would be wasted."""
    peak, shape, batch = peak_rate(config), SCHEDULES[config.schedule.shape], config.global_batch
    warmup, total = config.schedule.warmup * num_train, config.epochs * num_train
    return lambda seen: peak * warm_up(seen + batch, warmup) * shape(seen - warmup, total - warmup)


def _to_input(images: ImageSet, device: torch.device) -> ToInput:
    """From stored pictures to what the net wants: floats with mean 0 and deviation 1 over (a part of) the training set."""
    some = images.train.images[:: max(1, len(images.train) // 5000)].astype("float32")
    mean, deviation = float(some.mean()), max(float(some.std()), 1e-6)
    shape = images.picture_shape

    def to_input(stored: torch.Tensor) -> torch.Tensor:
        return stored.to(device, torch.float32).sub_(mean).div_(deviation).view(-1, *shape)

    return to_input
