"""What is in a source: how many samples, files and bytes, which sizes and formats of images, how
many of each class.

Images are looked at by their headers, and only a few hundred of them, spread over the set. Classes
are counted over all samples; a TFRecord source keeps the labels in its index, so that the second
count is quick.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from allstep.data.inspect.verify import is_encoded
from allstep.data.packing.image import kind_of, size_of
from allstep.data.packing.plan import spread
from allstep.data.sources.files import stamp_of
from allstep.data.sources.source import BadSample, Source
from allstep.errors import DataError

_LOOKED_AT = 300


@dataclass(frozen=True)
class Spread:
    """Smallest, middle and largest of some numbers."""

    smallest: int
    median: int
    largest: int


@dataclass(frozen=True)
class ImageSummary:
    """What the images that were looked at are like."""

    looked_at: int
    bad: int
    formats: dict[str, int]
    height: Spread | None
    width: Spread | None


@dataclass(frozen=True)
class Info:
    """What is in a source."""

    where: str
    kind: str
    num_samples: int
    num_files: int
    nbytes: int
    pictures: ImageSummary
    num_classes: int
    classes: tuple[tuple[str, int], ...]
    """Name and number of samples of each class, in the order of the labels; empty where samples
    have no class numbers."""
    num_unlabelled: int
    labels: str
    """How labels are stored, and how names are numbered."""

    @property
    def mean_nbytes(self) -> float:
        """What a sample takes."""
        return self.nbytes / self.num_samples if self.num_samples else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "mean_nbytes": self.mean_nbytes}


def info(source: Source, where: str) -> Info:
    """What is in `source`, which was opened at `where`."""
    files = files_of(source)
    counts, unlabelled = _count(source)
    names = [(_name(source, label), count) for label, count in counts]
    nbytes = sum(_nbytes(name) for name in files)
    kind = type(source).__name__.removesuffix("Source")
    return Info(
        where=where,
        kind=kind,
        num_samples=len(source),
        num_files=len(files),
        nbytes=nbytes,
        pictures=look_at(source),
        num_classes=len(names),
        classes=tuple(names),
        num_unlabelled=unlabelled,
        labels=source.describe_labels(),
    )


def files_of(source: Source) -> list[str]:
    """The files that the samples lie in, each once.

    Samples of one file follow each other, so where both ends are in one file, all are.
    """
    found: dict[str, None] = {}
    pieces = [(0, len(source) - 1)] if len(source) else []
    while pieces:
        first, last = pieces.pop()
        before, after = source.place(first).file, source.place(last).file
        found[before] = None
        if before != after and last - first > 1:
            middle = (first + last) // 2
            pieces += [(middle, last), (first, middle)]
        else:
            found[after] = None
    return list(found)


def look_at(source: Source, count: int = _LOOKED_AT) -> ImageSummary:
    """Formats and sizes of up to `count` images."""
    seen = [_look(source, number) for number in spread(len(source), count)] if len(source) else []
    good = [each for each in seen if each is not None]
    heights, widths = ([size[axis] for _, size in good if size] for axis in (0, 1))
    formats = dict(Counter(kind for kind, _ in good).most_common())
    return ImageSummary(
        len(seen), len(seen) - len(good), formats, _spread(heights), _spread(widths)
    )


def _look(source: Source, number: int) -> tuple[str, tuple[int, ...]] | None:
    try:
        data = source.read(number).data
        if not is_encoded(data):
            return f"{data.dtype} array", data.shape
        kind = kind_of(data)
        return kind, size_of(data, kind)
    except (BadSample, ValueError):
        return None


def _spread(numbers: list[int]) -> Spread | None:
    return Spread(min(numbers), int(np.median(numbers)), max(numbers)) if numbers else None


def _count(source: Source) -> tuple[list[tuple[int, int]], int]:
    """Label and number of samples of each class, and how many samples have no class number."""
    labels = source.targets()
    known = labels[labels >= 0]
    # A table up to the largest label would not fit into memory if that one is damaged.
    found, counts = np.unique(known, return_counts=True)
    of_label = dict.fromkeys(range(len(source.classes) if len(known) else 0), 0)
    of_label.update(zip(found.tolist(), counts.tolist(), strict=True))
    return sorted(of_label.items()), len(labels) - len(known)


def _name(source: Source, label: int) -> str:
    return source.classes[label] if label < len(source.classes) else str(label)


def _nbytes(file: str) -> int:
    try:
        return int(stamp_of(file)["size"])
    except DataError:  # arrays in memory lie in no file
        return 0
