"""The samples on which a trained model is evaluated, and a loader of them.

```
own data       a split that the run's config opens
--data PLACE   all samples there, prepared as for `allstep predict`
--samples N    N of them, chosen by `data.split_seed` alone: every command that asks for as many
               samples of the same data gets the same ones, in the order of the source
```
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from allstep.data import Loader, order
from allstep.data.augment.transform import Transform
from allstep.data.opening import open_source
from allstep.data.sources.arrays import CifarSource, IdxSource
from allstep.data.sources.source import Source
from allstep.models.by_name import check_shape
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.existing_run import Evaluation
from allstep.train.input.classes import check_same_classes, given_names
from allstep.train.input.images import make_transform
from allstep.train.input.splits import open_splits
from allstep.train.use.load_run import Trained, image_transform
from allstep.train.use.predict import num_at_once
from allstep.world import World


@dataclass(frozen=True)
class OpenedSamples:
    """Samples to evaluate."""

    source: Source
    numbers: order.Numbers | None
    """Numbers of the samples in the source; None for all."""
    transform: Transform | None
    where: str
    """Description of the samples."""

    def __len__(self) -> int:
        return len(self.source) if self.numbers is None else len(self.numbers)


def open_samples(asked: Evaluation, config: RunConfig, trained: Trained) -> OpenedSamples:
    """Open the samples that an evaluation asks for; raise a UserError if the model cannot use them.

    `config` is that of the run, with the changes that `asked` makes.
    """
    elsewhere = asked.place is not None
    opened = (_elsewhere if elsewhere else _own)(asked, config, trained)
    if opened.transform is not None and opened.transform.shape is not None:
        height, width, channels = opened.transform.shape
        check_shape(config.model.name, trained.shape, (channels, height, width))
    return opened


def _own(asked: Evaluation, config: RunConfig, trained: Trained) -> OpenedSamples:
    """Open a split of the run's own data."""
    splits = open_splits(config)
    check_same_classes(splits.place, splits.classes, trained.classes)
    split = {"test": splits.test, "validation": splits.validation, "train": splits.train}[
        asked.split
    ]
    if config.overfit is not None:
        split = splits.train.first(config.overfit)
    where = f"{asked.split} split of {splits.title}"
    if asked.num_samples is not None:
        where = _subset(asked.num_samples, len(split), f"the {where}") or where
        split = split.sample(asked.num_samples, config.data.split_seed)
    transform = make_transform("prepare", config.data, split.seen)
    return OpenedSamples(split.source, split.numbers, transform, where)


def _elsewhere(asked: Evaluation, config: RunConfig, trained: Trained) -> OpenedSamples:
    """Open the data at another place."""
    section, place = config.data, asked.place
    assert place is not None
    source = open_source(
        place,
        labels_from=section.labels_from,
        num_classes=section.num_classes,
        classes=given_names(trained.classes),
    )
    has_test = isinstance(source, IdxSource | CifarSource) and Path(place).is_dir()
    if asked.split == "test" and has_test:
        source = open_source(place, train=False)
    check_same_classes(place, source.classes, trained.classes)
    transform = image_transform(section.prepare, trained.shape, section.max_pixels)
    if asked.num_samples is None:
        return OpenedSamples(source, None, transform, place)
    count = np.arange(min(asked.num_samples, len(source)))
    numbers = np.sort(order.permute(count, len(source), "sample", section.split_seed))
    where = _subset(asked.num_samples, len(source), place) or place
    return OpenedSamples(source, numbers, transform, where)


def _subset(count: int, total: int, where: str) -> str:
    """Return the description of `count` of `total` samples of a place; "" if they are all."""
    return f"{count:,} of the {total:,} samples of {where}" if count < total else ""


def make_loader(
    config: RunConfig,
    trained: Trained,
    opened: OpenedSamples,
    world: World,
    device: torch.device,
) -> Loader:
    """Return the loader of the samples, each rank of `world` with its share."""
    section = config.data
    return Loader(
        opened.source,
        opened.transform,
        batch=num_at_once(trained.shape) * world.size,
        world=world,
        seed=None,
        numbers=opened.numbers,
        workers=section.workers,
        strict=section.strict,
        budget=section.budget,
        device=device,
    )
