"""Opening the sources of a run: a named dataset, or data at the places that the config names.

Errors of a source start with the config key that names it, such as `data.train`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from allstep import data
from allstep.data.opening import open_source
from allstep.data.sources.source import Source
from allstep.errors import DataError
from allstep.train.config.data_config import DataConfig

Progress = Callable[[str, int, int | None], None]
"""Function that receives the progress of a download: text, bytes so far, all bytes if known."""
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "eval"}


class Sources(NamedTuple):
    """The opened sources, before samples are held out; None where there is no source."""

    title: str
    """Name of the dataset in messages and reports."""
    place: str
    """Path of the data, or its description if it has no path, for messages."""
    train: Source
    validation: Source | None
    test: Source | None


def open_sources(section: DataConfig, progress: Progress | None = None) -> Sources:
    """Open the sources of a run; `progress` is called with the progress of a download."""
    if section.train is None:
        return _open_named(section, progress)
    return _open_own(section, section.train, progress)


def _open_named(section: DataConfig, progress: Progress | None) -> Sources:
    """Open a dataset that is known by name, as arrays."""
    found = data.find(data.named_set(section.name), section.folder, progress)
    images = data.load(found)
    train, test = (
        data.ArraySource(part.images, part.labels, classes=images.classes, name=str(found.folder))
        for part in (images.train, images.test)
    )
    validation = _open_separate("validation", section, images.classes, progress)
    other_test = _open_separate("test", section, images.classes, progress)
    return Sources(found.title, str(found.folder), train, validation, other_test or test)


def _open_own(section: DataConfig, where: str, progress: Progress | None) -> Sources:
    """Open the data at the places that the config names."""
    train = _open("train", where, section, (), progress)
    _check_no_splits(where, train)
    test = _open_separate("test", section, train.classes, progress)
    if test is None and section.test is None:
        test = _open_own_test(where, train, section)
    name = section.name if section.name not in data.NAMED else Path(where).name
    validation = _open_separate("validation", section, train.classes, progress)
    return Sources(name, where, train, validation, test)


def _open(
    key: str,
    where: str,
    section: DataConfig,
    classes: tuple[str, ...],
    progress: Progress | None,
    *,
    train: bool = True,
) -> Source:
    """Open the data at `where`, which the config key `data.<key>` names.

    `classes` are those of the training data: they give the numbers of labels that are names.
    `train` selects the training or the test files of a format that has both.
    """
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


def _open_separate(
    key: str, section: DataConfig, classes: tuple[str, ...], progress: Progress | None
) -> Source | None:
    """Open separate data of a split; return None if the config names no place for it."""
    where = getattr(section, key)
    return _open(key, where, section, classes, progress) if isinstance(where, str) else None


def _open_own_test(where: str, train: Source, section: DataConfig) -> Source | None:
    """Return the test split that folders of idx files and of CIFAR-10 contain, if any."""
    if not isinstance(train, data.IdxSource | data.CifarSource) or not Path(where).is_dir():
        return None
    try:
        return _open("train", where, section, (), None, train=False)
    except DataError:
        return None


def _check_no_splits(where: str, train: Source) -> None:
    """Raise DataError if the class folders are called train, val or the like.

    Such folders are splits of a dataset, not classes.
    """
    if (
        isinstance(train, data.FolderSource)
        and "train" in train.classes
        and set(train.classes) <= _SPLIT_NAMES
    ):
        others = [name for name in train.classes if name != "train"]
        rest = "".join(
            f" data.{'test' if name == 'test' else 'validation'}={Path(where) / name}"
            for name in others[:2]
        )
        raise DataError(
            f"data.train: the folders in {where} are called {', '.join(train.classes)}, which are"
            " splits of a dataset rather than classes: set"
            f" data.train={Path(where) / 'train'}{rest}"
        )
