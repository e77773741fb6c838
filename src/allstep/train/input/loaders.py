"""The loaders of a run: training in a new order every epoch, augmented; validation and test as they
lie, prepared.

With `overfit` all three have the same few training samples, and none is augmented: a model that
cannot learn these by heart has a mistake in it.

A fourth, `make_sample_loader`, reads a fixed sample of the training split the way validation is
read, for the end of a run.
"""

from functools import partial
from pathlib import Path

import torch

from allstep.data import Loader
from allstep.data.augment.parse import spelled_mix
from allstep.data.augment.transform import Transform
from allstep.errors import ConfigError
from allstep.train.config.check import check_batch
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Splits
from allstep.world import World

_MOST, _VALUES = (
    500,
    6_000_000,
)  # of an evaluation batch of one rank: no gradients are kept, so more fits than in training


SAMPLE = 5000
"""Training samples that are evaluated at the end of a run, at most; never more than the validation
split has."""


def make_loaders(
    config: ResolvedConfig,
    splits: Splits,
    world: World,
    out: Path,
    device: torch.device | None = None,
) -> dict[str, Loader]:
    """By part: train, validation, test.

    Bad samples are listed in `out`; `config` knows its global batch.
    """
    check_batch(config, len(splits.train))
    section = config.data
    loader = partial(
        Loader,
        world=world,
        workers=section.workers,
        strict=section.strict,
        budget=section.budget,
        device=device,
    )
    train, validation, test = splits.train, splits.validation, splits.test
    if config.overfit is not None:
        train = validation = test = splits.train.first(config.overfit)
    many = _evaluation_batch(config, splits, world.size) * world.size
    loaders = {
        "train": loader(
            train.source,
            transform=_training(config, splits),
            batch=config.batch,
            seed=config.seed,
            numbers=train.numbers,
            quarantine=out / "quarantine.jsonl",
        )
    }
    for name, split in (("validation", validation), ("test", test)):
        loaders[name] = loader(
            split.source,
            transform=make_transform("prepare", section, split.seen),
            batch=many,
            seed=None,
            numbers=split.numbers,
            quarantine=out / f"quarantine-{name}.jsonl",
        )
    return loaders


def make_sample_loader(
    config: ResolvedConfig, splits: Splits, world: World, device: torch.device | None
) -> Loader | None:
    """A fixed sample of the training split, prepared as for evaluation; None with `overfit`, where
    validation is that already.

    As many samples as the validation split has, at most `SAMPLE`, chosen by `data.split_seed`.
    Training has listed its bad samples before: here they are left out without a limit.
    """
    if config.overfit is not None:
        return None
    section = config.data
    split = splits.train.sample(min(SAMPLE, len(splits.validation)), section.split_seed)
    ours, theirs = splits.prepared_shape(split), splits.evaluated_shape
    if ours != theirs:
        raise ConfigError(
            f"data.prepare={section.prepare!r} leaves training images of {_size(ours)} and"
            f" validation images of {_size(theirs)}; add a step to data.prepare that makes them"
            " equal, such as Resize or CentreCrop"
        )
    return Loader(
        split.source,
        make_transform("prepare", section, split.seen),
        batch=_evaluation_batch(config, splits, world.size) * world.size,
        world=world,
        seed=None,
        numbers=split.numbers,
        workers=section.workers,
        budget=len(split),
        device=device,
    )


def _size(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))


def _training(config: ResolvedConfig, splits: Splits) -> Transform | None:
    seen = splits.train.seen
    if config.overfit is not None:
        return make_transform("prepare", config.data, seen)
    return make_transform(
        "augment", config.data, seen, spelled_mix(config.data.mix), splits.num_classes
    )


def _evaluation_batch(config: ResolvedConfig, splits: Splits, size: int) -> int:
    """Samples of one rank: as many as in training, or more where images are small."""
    channels, height, width = splits.evaluated_shape
    trained = config.batch // (size * config.accumulation)
    return max(1, trained, min(_MOST, _VALUES // (channels * height * width)))
