"""The classes of a run, derived from what is known about its splits.

| known | classes |
|---|---|
| names (class folders, `classes.txt`, named datasets) | these; the same in all splits |
| `data.num_classes` | that many, named by their numbers |
| neither, but labels that are quick to read | 0 to the largest label of the training split |
| neither | ConfigError: set `data.num_classes` (reading all records to count takes too long) |

Labels that are quick to read are checked against the number of classes here. The labels of records
are checked when training reads them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
from allstep.data.sources.class_folders import FolderSource
from allstep.data.sources.labels import check_class_names
from allstep.data.sources.source import Source
from allstep.data.sources.synthetic import SyntheticSource
from allstep.errors import ConfigError, DataError
from allstep.train.config.data_config import DataConfig

_QUICK_LABELS = (ArraySource, IdxSource, CifarSource, FolderSource, SyntheticSource)
_CIFAR_CLASSES = 10


def class_names(section: DataConfig, train: Source, others: Iterable[Source]) -> tuple[str, ...]:
    """Return the names of the classes, or their numbers as text where they have no names.

    Raise ConfigError or DataError if the number of classes is unknown, if the splits have different
    classes, or if a label that is quick to read is out of range.
    """
    names = _names(section, train)
    for source in others:
        if train.classes and source.classes and source.classes != train.classes:
            raise DataError(_difference(train, source))
    for source in (train, *others):
        _check_labels(source, len(names))
    return names


def _names(section: DataConfig, train: Source) -> tuple[str, ...]:
    """Return the class names of the training split; see the table of the module."""
    asked = section.num_classes
    if train.classes:
        _check_number(asked, train.classes)
        check_class_names(train.classes)
        return train.classes
    if train.labeling.problem:
        raise DataError(
            f"{train.place(0).file}: no label can be read; the first: {train.labeling.problem}"
        )
    if asked is None and not isinstance(train, _QUICK_LABELS):
        raise ConfigError(
            f"the {len(train)} records of {train.place(0).file} do not state how many classes there"
            " are: set data.num_classes, or put a file classes.txt with their names, one per line,"
            " next to them"
        )
    return tuple(map(str, range(asked or _count(train))))


def _check_number(asked: int | None, names: Sequence[str]) -> None:
    """Raise ConfigError if `data.num_classes` is set and is not the number of class names."""
    if asked is not None and asked != len(names):
        raise ConfigError(
            f"config key 'data.num_classes': the training split has {len(names)} classes "
            f"({_some(names)}), found {asked}"
        )


def _count(source: Source) -> int:
    """Return the number of classes of a source whose labels are quick to read."""
    if isinstance(source, CifarSource):
        return _CIFAR_CLASSES
    return int(source.targets().max(initial=0)) + 1


def _check_labels(source: Source, num_classes: int) -> None:
    """Raise DataError for labels that are no class numbers below `num_classes`."""
    if not isinstance(source, ArraySource | IdxSource | CifarSource):
        return
    labels = source.target
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{source.place(0).file}: expected one class number for each sample, found"
            f" {labels.dtype} of shape {labels.shape}"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(_wrong_labels(source, labels, wrong, num_classes))


def _wrong_labels(
    source: Source, labels: NDArray[Any], wrong: NDArray[np.intp], num_classes: int
) -> str:
    """Return the error message about the samples `wrong`, whose labels are out of range."""
    first = int(wrong[0])
    more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
    return (
        f"sample {first} of {source.place(first).file}: its label is {labels[first]}, expected"
        f" 0 to {num_classes - 1}{more}: correct the labels, or set data.num_classes"
    )


def _difference(train: Source, other: Source) -> str:
    """Return the error message about two sources with different classes."""
    ours, theirs = set(train.classes), set(other.classes)
    places = train.place(0).file, other.place(0).file
    missing = [
        f"{_some(sorted(only))} only in {whose}"
        for only, whose in ((ours - theirs, "the training split"), (theirs - ours, "the other"))
        if only
    ]
    what = "; ".join(missing) or "the same names in another order"
    return (
        f"the training split has {len(train.classes)} classes and another split"
        f" {len(other.classes)}, not the same ones: {what} (for example {places[0]} and"
        f" {places[1]})"
    )


def _some(names: Iterable[str]) -> str:
    """Return the first five names, and how many more there are, for a message."""
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (
        f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    )


def check_same_classes(place: str, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Raise DataError unless the data at `place` has the classes that a trained model knows.

    `theirs` are the class names of the data, `ours` those of the model. Labels are numbers, so the
    classes must be the same in the same order. Classes of the model without names accept any names,
    if there are not more of them.
    """
    theirs, ours = tuple(theirs), tuple(ours)
    fits_numbers = not given_names(ours) and len(theirs) <= len(ours)
    if not theirs or not ours or theirs == ours or fits_numbers:
        return
    here, there = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
    what = "; ".join(
        f"only {whose}: {', '.join(only[:5])}"
        for whose, only in (("there", here), ("in the run", there))
        if only
    )
    raise DataError(
        f"{place}: has {len(theirs)} classes, and the model has {len(ours)}, not the same ones:"
        f" {what or 'another order'}; keep a folder also for classes without images"
    )


def given_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes; () if they only have numbers."""
    return () if tuple(classes) == tuple(map(str, range(len(classes)))) else tuple(classes)
