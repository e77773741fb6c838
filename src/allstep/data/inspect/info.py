"""What a source contains: number of samples, files and bytes, sizes and formats of the images, and
samples per class.

Sizes and formats come from the headers of a few hundred images, evenly spread over the dataset.
Classes are counted over all samples; a TFRecord source stores the labels in its index, so that the
second count is quick.
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

_NUM_INSPECTED = 300


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of some numbers."""

    smallest: int
    median: int
    largest: int


@dataclass(frozen=True)
class ImageSummary:
    """Formats and sizes of the images that were inspected."""

    looked_at: int
    """Number of images that were inspected."""
    bad: int
    """How many of them cannot be read."""
    formats: dict[str, int]
    """Number of images of each format, most frequent first."""
    height: Spread | None
    width: Spread | None


@dataclass(frozen=True)
class Info:
    """What a source contains: the figures of `allstep data info`."""

    where: str
    """Path or URL at which the source was opened."""
    kind: str
    """Class of the source without "Source", such as "TFRecord"."""
    num_samples: int
    num_files: int
    nbytes: int
    """Size of all files in bytes."""
    images: ImageSummary
    num_classes: int
    classes: tuple[tuple[str, int], ...]
    """Name and number of samples of each class, in label order; () if targets are no classes."""
    num_unlabelled: int
    """Number of samples without a class number, bad samples included."""
    labels: str
    """How labels are stored, and how names are numbered."""

    @property
    def mean_nbytes(self) -> float:
        """Return the mean size of a sample in bytes."""
        return self.nbytes / self.num_samples if self.num_samples else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all figures as values that JSON can hold, for `allstep data info --json`."""
        # The key "pictures" is older than the field's name; programs may read it.
        values = {"pictures" if key == "images" else key: v for key, v in asdict(self).items()}
        return {**values, "mean_nbytes": self.mean_nbytes}


def info(source: Source, where: str) -> Info:
    """Return what `source`, which was opened at `where`, contains."""
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
        images=inspect_images(source),
        num_classes=len(names),
        classes=tuple(names),
        num_unlabelled=unlabelled,
        labels=source.describe_labels(),
    )


def files_of(source: Source) -> list[str]:
    """Return the files that contain the samples of `source`, each once, in order.

    Samples of one file are contiguous: a range with both ends in one file is in that file. So a
    bisection finds all files without a look at every sample.
    """
    found: dict[str, None] = {}
    ranges = [(0, len(source) - 1)] if len(source) else []
    while ranges:
        first, last = ranges.pop()
        before, after = source.place(first).file, source.place(last).file
        found[before] = None
        if before != after and last - first > 1:
            middle = (first + last) // 2
            ranges += [(middle, last), (first, middle)]
        else:
            found[after] = None
    return list(found)


def inspect_images(source: Source, count: int = _NUM_INSPECTED) -> ImageSummary:
    """Return formats and sizes of up to `count` images, evenly spread over the source."""
    numbers = spread(len(source), count) if len(source) else []
    seen = [_format_and_size(source, number) for number in numbers]
    good = [each for each in seen if each is not None]
    heights, widths = ([size[axis] for _, size in good if size] for axis in (0, 1))
    formats = dict(Counter(kind for kind, _ in good).most_common())
    return ImageSummary(
        len(seen), len(seen) - len(good), formats, _spread(heights), _spread(widths)
    )


def _format_and_size(source: Source, number: int) -> tuple[str, tuple[int, ...]] | None:
    """Return format and size of the image of sample `number`; None if it cannot be read."""
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
    """Return (label, number of samples) of each class, and the number of samples without one."""
    labels = source.targets()
    known = labels[labels >= 0]
    # np.bincount needs a table up to the largest label; a damaged one may exceed the memory.
    found, counts = np.unique(known, return_counts=True)
    of_label = dict.fromkeys(range(len(source.classes) if len(known) else 0), 0)
    of_label.update(zip(found.tolist(), counts.tolist(), strict=True))
    return sorted(of_label.items()), len(labels) - len(known)


def _name(source: Source, label: int) -> str:
    return source.classes[label] if label < len(source.classes) else str(label)


def _nbytes(file: str) -> int:
    """Return the size of a file in bytes; 0 for an array in memory, which has no file."""
    try:
        return int(stamp_of(file)["size"])
    except DataError:
        return 0
