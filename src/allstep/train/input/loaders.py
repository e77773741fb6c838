"""The loaders of a run.

The training loader has a new order every epoch and augments. The loaders of validation and test
read in stored order and only prepare. With `overfit` all three read the same few training samples,
and none augments: a model that cannot memorize these has a bug.

`make_sample_loader` makes a fourth one for the end of a run: it reads a fixed sample of the
training split in the way of the validation split.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from allstep.data import Loader
from allstep.data.augment.parse import spelled_mix
from allstep.data.augment.transform import Transform
from allstep.errors import ConfigError
from allstep.train.config.check_config import check_batch
from allstep.train.config.initial_weights import initial_weights
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Splits
from allstep.world import World

# Limits of the evaluation batch of one rank. It may be larger than in training, because no
# gradients are kept.
_MAX_EVALUATION_SAMPLES = 500
_MAX_EVALUATION_VALUES = 6_000_000

SAMPLE = 5000
"""Maximum number of training samples that are evaluated at the end of a run.

It is further limited by the size of the validation split.
"""


def make_loaders(
    config: ResolvedConfig,
    splits: Splits,
    world: World,
    out: Path | None,
    device: torch.device | None = None,
    worker: int | None = None,
) -> dict[str, Loader]:
    """Return the loaders by split name: train, validation, test.

    `out` is the folder for the lists of bad samples; None: there are no lists. `device` is where
    batches are used (default: the CPU). `worker` is the number of this worker in an elastic run,
    where its rank may change.
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
        writer=worker,
    )
    train, validation, test = splits.train, splits.validation, splits.test
    if config.overfit is not None:
        train = validation = test = splits.train.first(config.overfit)
    evaluation_batch = _evaluation_batch(config, splits, world.size) * world.size
    loaders = {
        "train": loader(
            train.source,
            transform=_training(config, splits),
            batch=config.batch,
            shares=initial_weights(config.shares, world.size),
            seed=config.seed,
            numbers=train.numbers,
        )
    }
    for name, split in (("validation", validation), ("test", test)):
        loaders[name] = loader(
            split.source,
            transform=make_transform("prepare", section, split.seen),
            batch=evaluation_batch,
            seed=None,
            numbers=split.numbers,
        )
    if out is not None:
        list_bad_samples(loaders, out)
    return loaders


def list_bad_samples(loaders: Mapping[str, Loader], out: Path) -> None:
    """List the bad samples of each loader in a file of the folder `out`."""
    for name, loader in loaders.items():
        split = "" if name == "train" else f"-{name}"
        loader.list_bad_samples(out / f"quarantine{split}.jsonl")


def place_loaders(
    loaders: Mapping[str, Loader], config: ResolvedConfig, splits: Splits, world: World
) -> None:
    """Give the loaders the shares of a rank of `world`; the batch of evaluations follows its size.

    The batch of the training loader stays.
    """
    for name, loader in loaders.items():
        loader.place(world)
        if name == "train":
            loader.shares = initial_weights(config.shares, world.size)
        else:
            loader.batch = _evaluation_batch(config, splits, world.size) * world.size


def make_sample_loader(
    config: ResolvedConfig, splits: Splits, world: World, device: torch.device | None
) -> Loader | None:
    """Return a loader of a fixed sample of the training split, prepared as for evaluation.

    The sample has as many samples as the validation split, at most `SAMPLE`, chosen by
    `data.split_seed`. Return None with `overfit`, where the validation split is such a sample
    already. Bad samples are skipped without a limit, because training has counted and listed them.
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
    """Return a shape as text, such as 3x32x32."""
    return "x".join(map(str, shape))


def _training(config: ResolvedConfig, splits: Splits) -> Transform | None:
    """Return the transform of the training loader."""
    seen = splits.train.seen
    if config.overfit is not None:
        return make_transform("prepare", config.data, seen)
    return make_transform(
        "augment", config.data, seen, spelled_mix(config.data.mix), splits.num_classes
    )


def _evaluation_batch(config: ResolvedConfig, splits: Splits, size: int) -> int:
    """Return the samples per rank of an evaluation batch.

    They are as many as in a training micro-batch, or more where images are small.
    """
    channels, height, width = splits.evaluated_shape
    trained = config.batch // (size * config.accumulation)
    by_values = _MAX_EVALUATION_VALUES // (channels * height * width)
    return max(1, trained, min(_MAX_EVALUATION_SAMPLES, by_values))
