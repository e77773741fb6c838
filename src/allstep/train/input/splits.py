"""The data of a run: its three parts, its classes, and what its images are like.

```
data.name                  a named set: arrays in memory, with a test part of its own
data.train                 data of one's own: whatever `open_source` reads          (the name is then any word)

training set  |------------------------ kept ----------------------|-- validation --|-- test --|
                                                                    data.validation  data.test
```

Validation and test are sets of their own where the config names their places, or, for the test,
where the set has one; else samples of the training set are held out, chosen by `data.split_seed`
alone. The samples for the test are taken away first, then those for the validation, each by a
permutation of its own (`order`), so no sample is in two parts, and whether there is a test set
elsewhere does not depend on anything else.

Opening reads indexes, never all of the records, and needs no torch: the launching process does it
to say what is wrong before workers start. What makes batches of the parts does (`loaders`,
`to_input`), and is fetched when first asked for (PEP 562).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from allstep import data
from allstep.data import order
from allstep.data.opening import open_source
from allstep.data.packing.plan import spread
from allstep.data.sources.source import Source
from allstep.errors import ConfigError, DataError
from allstep.train.config.run_config import DataConfig, RunConfig
from allstep.train.input import classes as naming
from allstep.train.input.images import Look, look, make_transform

if TYPE_CHECKING:
    from allstep.train.input.loaders import make_loaders
    from allstep.train.input.mean_and_std import measure
    from allstep.train.input.to_input import make_to_input

__all__ = ["Split", "Splits", "make_loaders", "make_to_input", "measure", "open_splits"]

Progress = Callable[[str, int, int | None], None]
Figures = tuple[float, ...]
_TRIED = 1000  # samples of which some are looked at
_PARTS = {"train", "training", "val", "valid", "validation", "test", "eval"}


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
    """Samples of a source: those with these numbers, or all."""

    source: Source
    numbers: order.Numbers | None
    seen: Look
    """What its images are like."""

    def __len__(self) -> int:
        return len(self.source) if self.numbers is None else len(self.numbers)

    def some(self, count: int) -> order.Numbers:
        """Numbers of up to `count` samples, evenly spread over the part."""
        return _spread(self.numbers, len(self), count)

    def sample(self, count: int, seed: int) -> "Split":
        """Up to `count` samples, chosen by `seed` alone (not by the run's), in the order of the
        source."""
        places = order.permute(np.arange(min(count, len(self))), len(self), "sample", seed)
        return replace(
            self, numbers=np.sort(places if self.numbers is None else self.numbers[places])
        )

    def first(self, count: int) -> "Split":
        """The first `count` samples alone."""
        return replace(
            self, numbers=np.arange(count) if self.numbers is None else self.numbers[:count]
        )


@dataclass(frozen=True)
class Splits:
    """The data of a run, opened."""

    title: str
    place: str
    """Where it is, for people."""
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]
    """Names of the classes; their numbers where they have no names."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image as a model is trained on it."""
    section: DataConfig
    mean: Figures | None = None
    """Of each channel, from 0 to 255.

    None: still to be measured; `replace(splits, **measure(splits))` knows it.
    """
    std: Figures | None = None

    @property
    def notes(self) -> list[str]:
        """Lines for the user about the sets."""
        sources = (self.train.source, self.validation.source, self.test.source)
        return list(dict.fromkeys(note for source in sources for note in source.notes))

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def evaluated_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as a model is evaluated on it."""
        return self.prepared_shape(self.validation)

    def prepared_shape(self, split: Split) -> tuple[int, int, int]:
        """The same of images of one of the parts: sets of their own may differ in size."""
        return _shape("prepare", self.section, split.seen)

    def image_facts(self) -> dict[str, Any]:
        """What somebody with the weights alone must know to use the model: plain values."""
        return {
            "shape": list(self.evaluated_shape),
            "trained_shape": list(self.shape),
            "mean": None if self.mean is None else list(self.mean),
            "std": None if self.std is None else list(self.std),
            "prepare": self.section.prepare,
            "classes": list(self.classes),
        }


class _Chosen(NamedTuple):
    """The samples of a part."""

    source: Source
    numbers: order.Numbers | None = None


class _Whole(NamedTuple):
    """What was opened, before samples are held out. None: there is no such set."""

    title: str
    place: str
    train: Source
    validation: Source | None
    test: Source | None


def open_splits(
    config: RunConfig, folder: Path | None = None, progress: Progress | None = None
) -> Splits:
    """Opens the data of `config`; `folder` is where a named set is, instead of where the config
    says."""
    section = config.data if folder is None else config.data.model_copy(update={"folder": folder})
    whole = (
        _named(section, progress)
        if section.train is None
        else _own(section, section.train, progress)
    )
    names = naming.settle(
        section, whole.train, [source for source in (whole.validation, whole.test) if source]
    )
    train, validation, test = _looked_at(_split(section, whole), section)
    mean, std = _given_figures(section, train.seen.channels)
    return Splits(
        title=whole.title,
        place=whole.place,
        train=train,
        validation=validation,
        test=test,
        classes=names,
        shape=_shape("augment", section, train.seen),
        section=section,
        mean=mean,
        std=std,
    )


def _shape(key: str, section: DataConfig, seen: Look) -> tuple[int, int, int]:
    """Channels, height and width of what comes out of `data.augment` or `data.prepare`."""
    transform = make_transform(key, section, seen)
    height, width = (
        transform.shape[:2] if transform is not None and transform.shape else seen.one_size
    )
    return seen.channels, height, width


def _looked_at(chosen: Sequence[_Chosen], section: DataConfig) -> list[Split]:
    """Each part with what its images are like, which must do for one model."""
    seen: dict[Source, Look] = {}
    for each in chosen:
        if each.source not in seen:
            some = _spread(each.numbers, len(each.source), _TRIED)
            seen[each.source] = look(each.source, some, section)
    splits = [Split(each.source, each.numbers, seen[each.source]) for each in chosen]
    for split in splits[1:]:
        ours, theirs = splits[0].seen, split.seen
        if ours.channels != theirs.channels:
            raise DataError(
                f"the images in {ours.where} have {ours.channels} channels, those in"
                f" {theirs.where} {theirs.channels}: a net takes one kind"
            )
        _shape("prepare", section, theirs)
    return splits


def _spread(numbers: order.Numbers | None, n: int, count: int) -> order.Numbers:
    n = n if numbers is None else len(numbers)
    places = np.array(spread(n, count), np.int64)
    return places if numbers is None else numbers[places]


def _named(section: DataConfig, progress: Progress | None) -> _Whole:
    """The arrays of a set that is known by name."""
    found = data.find(data.named_set(section.name), section.folder, progress)
    images = data.load(found)
    train, test = (
        data.ArraySource(split.images, split.labels, classes=images.classes, name=str(found.folder))
        for split in (images.train, images.test)
    )
    validation = _elsewhere("validation", section, images.classes, progress)
    other_test = _elsewhere("test", section, images.classes, progress)
    return _Whole(found.title, str(found.folder), train, validation, other_test or test)


def _own(section: DataConfig, where: str, progress: Progress | None) -> _Whole:
    """Whatever lies at the places that the config names."""
    train = _open("train", where, section, (), progress)
    _check_no_parts(where, train)
    test = _elsewhere("test", section, train.classes, progress)
    if test is None and section.test is None:
        test = _own_test(where, train, section)
    name = section.name if section.name not in data.NAMED else Path(where).name
    return _Whole(
        name, where, train, _elsewhere("validation", section, train.classes, progress), test
    )


def _open(
    key: str,
    where: str,
    section: DataConfig,
    classes: tuple[str, ...],
    progress: Progress | None,
    *,
    train: bool = True,
) -> Source:
    """Opens one dataset; `classes` are those of the training set, by which labels that are names
    are numbered."""
    try:
        source = open_source(
            where,
            labels_from=section.labels_from,
            num_classes=section.num_classes,
            classes=classes,
            train=train,
            progress=progress,
        )
    except DataError as error:
        raise DataError(f"data.{key}: {error}") from error
    if not len(source):
        raise DataError(f"data.{key}: {where} has no samples")
    return source


def _elsewhere(
    key: str, section: DataConfig, classes: tuple[str, ...], progress: Progress | None
) -> Source | None:
    where = getattr(section, key)
    return _open(key, where, section, classes, progress) if isinstance(where, str) else None


def _own_test(where: str, train: Source, section: DataConfig) -> Source | None:
    """The test part that folders of idx files and CIFAR-10's have."""
    if not isinstance(train, data.IdxSource | data.CifarSource) or not Path(where).is_dir():
        return None
    try:
        return _open("train", where, section, (), None, train=False)
    except DataError:
        return None


def _check_no_parts(where: str, train: Source) -> None:
    """Folders called train and val are parts of a set, not classes."""
    if (
        isinstance(train, data.FolderSource)
        and "train" in train.classes
        and set(train.classes) <= _PARTS
    ):
        others = [name for name in train.classes if name != "train"]
        rest = "".join(
            f" data.{'test' if name == 'test' else 'validation'}={Path(where) / name}"
            for name in others[:2]
        )
        raise DataError(
            f"data.train: the folders in {where} are called {', '.join(train.classes)}, which are"
            f" parts of a set rather than classes: write data.train={Path(where) / 'train'}{rest}"
        )


def _split(section: DataConfig, whole: _Whole) -> list[_Chosen]:
    """Training, validation and test."""
    n, seed = len(whole.train), section.split_seed
    numbers: order.Numbers | None = None
    if whole.test is None:
        count = num_held_out(
            "test", section.test if section.test is not None else section.validation, n
        )
        shuffled = order.permute(np.arange(n), n, "test", seed)
        numbers, test = shuffled[: n - count], _Chosen(whole.train, np.sort(shuffled[n - count :]))
    else:
        test = _Chosen(whole.test)
    if whole.validation is not None:
        return [_Chosen(whole.train, numbers), _Chosen(whole.validation), test]
    left = n if numbers is None else len(numbers)
    count = num_held_out("validation", section.validation, left, n)
    kept, held_out = (
        order.kept(np.arange(left - count), left, count, seed),
        order.held_out(left, count, seed),
    )
    if numbers is not None:
        kept, held_out = numbers[kept], numbers[held_out]
    return [_Chosen(whole.train, kept), _Chosen(whole.train, np.sort(held_out)), test]


def num_held_out(key: str, asked: int | str | None, n: int, whole: int | None = None) -> int:
    """How many of `n` samples are held out for the part `key`, of which the config says `asked`.

    If it says nothing, as many as of a set of `whole` samples (of n, when nobody says).
    """
    if isinstance(asked, str) or asked is None:
        asked = max(1, order.default_validation(whole or n))
        if n < 2:
            raise DataError(
                f"{n} sample is too few to hold out a part for data.{key}: there must be at least"
                " 2, better hundreds"
            )
    if not 1 <= asked < n:
        raise ConfigError(
            f"config key 'data.{key}': expected 1 to {n - 1} of {n} samples, found {asked}"
        )
    return asked


def _given_figures(section: DataConfig, channels: int) -> tuple[Figures | None, Figures | None]:
    """Mean and std as the config gives them, one for each channel; one alone does for all."""
    for key, figures in (("mean", section.mean), ("std", section.std)):
        if figures is not None and len(figures) not in (1, channels):
            raise ConfigError(
                f"config key 'data.{key}': expected one figure for each of {channels} channels,"
                f" found {len(figures)}"
            )
    if section.mean is None or section.std is None:
        return None, None
    times = {1: channels}
    mean, std = (each * times.get(len(each), 1) for each in (section.mean, section.std))
    return mean[:channels], std[:channels]
