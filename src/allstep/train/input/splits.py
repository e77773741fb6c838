"""The data of a run: its three splits, its classes, and what its images are like.

```
data.name                  a named dataset: arrays in memory, with a test split of its own
data.train                 the user's data: anything that `open_source` reads; data.name is free

training data |------------------------ kept ----------------------|-- validation --|-- test --|
              |-- train --|-- unused --|                            data.validation  data.test
                 data.use
```

Validation and test are separate data if the config names their places; the test split also if the
dataset has one of its own. Otherwise samples of the training data are held out, chosen by
`data.split_seed` alone: first those of the test split, then those of the validation split, each by
a permutation of its own (`order`). So no sample is in two splits. `data.use` trains on a part of
what is kept, chosen by a third permutation.

Opening reads indexes, never all records, and needs no torch: the launching process opens the data
to report errors before workers start. The modules that make batches of the splits (`loaders`,
`to_input`) need torch and are imported on first use (PEP 562).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from allstep.data import order
from allstep.data.packing.shard_plan import spread
from allstep.data.sources.source import Source
from allstep.errors import ConfigError, DataError
from allstep.train.config.data_config import DataConfig
from allstep.train.config.run_config import RunConfig
from allstep.train.input.classes import class_names
from allstep.train.input.hold_out import Selection, hold_out, use_part
from allstep.train.input.images import ImageInfo, inspect_images, make_transform
from allstep.train.input.open_sources import Progress, open_sources

if TYPE_CHECKING:
    from allstep.train.input.loaders import make_loaders
    from allstep.train.input.mean_and_std import measure
    from allstep.train.input.to_input import make_to_input

__all__ = ["Split", "Splits", "make_loaders", "make_to_input", "measure", "open_splits"]

Values = tuple[float, ...]
_NUM_CANDIDATES = 1000
"""Number of samples of a source from which `inspect_images` takes some."""


def __getattr__(name: str) -> Any:
    home = {
        "make_loaders": "allstep.train.input.loaders",
        "make_to_input": "allstep.train.input.to_input",
        "measure": "allstep.train.input.mean_and_std",
    }.get(name)
    if home is None:
        raise AttributeError(
            f"module 'allstep.train.input.splits' has no attribute {name!r}; it has"
            f" {', '.join(__all__)}"
        )
    return getattr(import_module(home), name)


@dataclass(frozen=True)
class Split:
    """Samples of a source: those in `numbers`, or all."""

    source: Source
    numbers: order.Numbers | None
    """Numbers of the samples in the source; None for all."""
    seen: ImageInfo
    """Size, channels and type of the stored images."""

    def __len__(self) -> int:
        return len(self.source) if self.numbers is None else len(self.numbers)

    def some(self, count: int) -> order.Numbers:
        """Return the numbers of up to `count` samples, evenly spread over the split."""
        return _spread(self.numbers, len(self), count)

    def sample(self, count: int, seed: int) -> "Split":
        """Return a split of up to `count` samples in the order of the source.

        They are chosen by `seed` alone; the seed of the run has no influence.
        """
        places = order.permute(np.arange(min(count, len(self))), len(self), "sample", seed)
        return replace(
            self, numbers=np.sort(places if self.numbers is None else self.numbers[places])
        )

    def first(self, count: int) -> "Split":
        """Return a split of the first `count` samples."""
        return replace(
            self, numbers=np.arange(count) if self.numbers is None else self.numbers[:count]
        )


@dataclass(frozen=True)
class Splits:
    """The opened data of a run."""

    title: str
    """Name of the dataset in messages and reports."""
    place: str
    """Path of the data, or its description if it has no path, for messages."""
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    """Names of the classes; their numbers where they have no names."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image in training."""
    section: DataConfig
    mean: Values | None = None
    """Mean of each channel, in levels from 0 to 255.

    None if it is not measured yet: `replace(splits, **measure(splits))` sets it.
    """
    std: Values | None = None
    """Std of each channel, in the unit of `mean`; None if it is not measured yet."""
    num_unused: int = 0
    """Training samples that `data.use` leaves out."""

    @property
    def notes(self) -> list[str]:
        """Return notes of the sources for the user, one per line, each once."""
        sources = (self.train.source, self.validation.source, self.test.source)
        return list(dict.fromkeys(note for source in sources for note in source.notes))

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.classes)

    @property
    def evaluated_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of an image in evaluation."""
        return self.prepared_shape(self.validation)

    def prepared_shape(self, split: Split) -> tuple[int, int, int]:
        """Return channels, height and width of a prepared image of one split.

        Splits with separate data may differ in size.
        """
        return _shape("prepare", self.section, split.seen)

    def image_facts(self) -> dict[str, Any]:
        """Return what is needed, besides the weights, to use the model, as plain values."""
        return {
            "shape": list(self.evaluated_shape),
            "trained_shape": list(self.shape),
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
            "prepare": self.section.prepare,
            "classes": list(self.classes),
        }


def open_splits(
    config: RunConfig, folder: Path | None = None, progress: Progress | None = None
) -> Splits:
    """Open the data of `config` and return its splits.

    `folder` replaces the config's `data.folder`, where a named dataset is stored. `progress` is
    called with the progress of a download.
    """
    section = config.data if folder is None else config.data.model_copy(update={"folder": folder})
    sources = open_sources(section, progress)
    others = [source for source in (sources.validation, sources.test) if source]
    names = class_names(section, sources.train, others)
    kept, *held_out = hold_out(section, sources)
    used = use_part(section, kept)
    train, validation, test = _inspected([used, *held_out], section)
    mean, std = _configured_mean_and_std(section, train.seen.channels)
    return Splits(
        title=sources.title,
        place=sources.place,
        train=train,
        validation=validation,
        test=test,
        classes=names,
        shape=_shape("augment", section, train.seen),
        section=section,
        mean=mean,
        std=std,
        num_unused=kept.num_samples - used.num_samples,
    )


def _shape(key: str, section: DataConfig, seen: ImageInfo) -> tuple[int, int, int]:
    """Return channels, height and width of the output of `data.augment` or `data.prepare`."""
    transform = make_transform(key, section, seen)
    height, width = (
        transform.shape[:2] if transform is not None and transform.shape else seen.one_size
    )
    return seen.channels, height, width


def _inspected(chosen: Sequence[Selection], section: DataConfig) -> list[Split]:
    """Return the splits with inspected images; raise DataError unless one model fits all."""
    seen: dict[Source, ImageInfo] = {}
    for each in chosen:
        if each.source not in seen:
            some = _spread(each.numbers, len(each.source), _NUM_CANDIDATES)
            seen[each.source] = inspect_images(each.source, some, section)
    splits = [Split(each.source, each.numbers, seen[each.source]) for each in chosen]
    for split in splits[1:]:
        _check_fits(splits[0].seen, split.seen, section)
    return splits


def _check_fits(ours: ImageInfo, theirs: ImageInfo, section: DataConfig) -> None:
    """Raise an error unless the images of another split suit a model of the training images."""
    if ours.channels != theirs.channels:
        raise DataError(
            f"the images in {ours.where} have {ours.channels} channels, those in"
            f" {theirs.where} {theirs.channels}: a model needs the same number"
        )
    _shape("prepare", section, theirs)


def _spread(numbers: order.Numbers | None, n: int, count: int) -> order.Numbers:
    """Return up to `count` of `numbers` (None: of 0 to n - 1), evenly spread."""
    n = n if numbers is None else len(numbers)
    places = np.array(spread(n, count), np.int64)
    return places if numbers is None else numbers[places]


def _configured_mean_and_std(
    section: DataConfig, channels: int
) -> tuple[Values | None, Values | None]:
    """Return mean and std of the config, one value per channel; (None, None) if it lacks one.

    A single value in the config holds for all channels.
    """
    for key, figures in (("mean", section.mean), ("std", section.std)):
        if figures is not None and len(figures) not in (1, channels):
            raise ConfigError(
                f"config key 'data.{key}': expected one value for each of {channels} channels,"
                f" found {len(figures)}"
            )
    if section.mean is None or section.std is None:
        return None, None
    times = {1: channels}
    mean, std = (each * times.get(len(each), 1) for each in (section.mean, section.std))
    return mean[:channels], std[:channels]
