"""The classes of a run, from what its sets know of them.

| known | then |
|---|---|
| names (class folders, `classes.txt`, named sets) | that many classes; all sets must have the same names |
| `data.num_classes` | that many, called by their numbers |
| neither, but labels that are quick to read | as many as the largest label of the training set says |
| neither | an error that asks for `data.num_classes`: reading all records to count would take too long |

Labels that are quick to read are held against the number of classes here; those of records when
their turn comes in training.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from allstep.data.sources.arrays import ArraySource, CifarSource, IdxSource
from allstep.data.sources.folder import FolderSource
from allstep.data.sources.labels import check_class_names
from allstep.data.sources.source import Source
from allstep.data.sources.synthetic import SyntheticSource
from allstep.errors import ConfigError, DataError
from allstep.train.config.run_config import DataConfig

_QUICK = (ArraySource, IdxSource, CifarSource, FolderSource, SyntheticSource)
_CIFAR = 10


def settle(section: DataConfig, train: Source, others: Iterable[Source]) -> tuple[str, ...]:
    """Names of the classes; numbers as text where they have none."""
    names = _names(section, train)
    for source in others:
        if train.classes and source.classes and source.classes != train.classes:
            raise DataError(_difference(train, source))
    for source in (train, *others):
        _check_labels(source, len(names))
    return names


def _names(section: DataConfig, train: Source) -> tuple[str, ...]:
    asked = section.num_classes
    if train.classes:
        if asked is not None and asked != len(train.classes):
            raise ConfigError(
                f"config key 'data.num_classes': the training set has {len(train.classes)} classes "
                f"({_some(train.classes)}), found {asked}"
            )
        check_class_names(train.classes)
        return train.classes
    if train.labeling.problem:
        raise DataError(
            f"{train.place(0).file}: no label can be read; the first: {train.labeling.problem}"
        )
    if asked is None and not isinstance(train, _QUICK):
        raise ConfigError(
            f"the {len(train)} records of {train.place(0).file} do not say how many classes there"
            " are: set data.num_classes, or put a file classes.txt with their names, one a line,"
            " beside them"
        )
    return tuple(map(str, range(asked or _count(train))))


def _count(source: Source) -> int:
    if isinstance(source, CifarSource):
        return _CIFAR
    return int(source.targets().max(initial=0)) + 1


def _check_labels(source: Source, num_classes: int) -> None:
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
        first = int(wrong[0])
        more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
        raise DataError(
            f"sample {first} of {source.place(first).file}: its label is {labels[first]}, expected"
            f" 0 to {num_classes - 1}{more}: mend the labels, or set data.num_classes"
        )


def _difference(train: Source, other: Source) -> str:
    ours, theirs = set(train.classes), set(other.classes)
    places = train.place(0).file, other.place(0).file
    parts = [
        f"{_some(sorted(only))} only in {whose}"
        for only, whose in ((ours - theirs, "the training set"), (theirs - ours, "the other"))
        if only
    ]
    what = "; ".join(parts) or "the same names in another order"
    return (
        f"the training set has {len(train.classes)} classes and another set {len(other.classes)},"
        f" not the same ones: {what} (for example {places[0]} and {places[1]})"
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:5])) + (
        f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    )


def check_same_classes(place: str, theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Raise DataError unless the data at `place` has the classes that a trained model knows.

    Labels are numbers, so the classes must be the same in the same order; classes that are only
    numbered may mean any.
    """
    theirs, ours = tuple(theirs), tuple(ours)
    if (
        not theirs
        or not ours
        or theirs == ours
        or (not given_names(ours) and len(theirs) <= len(ours))
    ):
        return
    here, there = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
    what = "; ".join(
        f"only {whose}: {', '.join(only[:5])}"
        for whose, only in (("there", here), ("in the run", there))
        if only
    )
    raise DataError(
        f"{place}: has {len(theirs)} classes, and the net knows {len(ours)}, not the same ones:"
        f" {what or 'another order'}; a class without images needs its folder, too"
    )


def given_names(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of classes; () where they are only numbered."""
    return () if tuple(classes) == tuple(map(str, range(len(classes)))) else tuple(classes)
