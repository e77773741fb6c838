"""Named data sets: where they are found, and their images in memory.

The files of a set (`sets`) are looked for in this order, and the first place that has all of them
is taken:

1. the folder the user gave (`--data`): then nothing else will do, and what is missing or wrong
   there is an error;
2. our cache folder (`ALLSTEP_CACHE`, else the user's cache folder);
3. folders where the system keeps the set (Debian's package `dataset-fashion-mnist`), or this
   package's own for the digits;
4. the set's home on the web, downloaded into the cache (`download`); only content with the right
   SHA-256 gets there.

`find` answers where, `load` reads and checks. Neither needs torch, so a launcher can say what is
wrong before any worker starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.cache import cache_folder
from allstep.data.sets.catalogue import FILES, NAMED, NamedSet, either, is_whole, named_set
from allstep.data.sets.download import get, not_there
from allstep.data.sets.http import Progress
from allstep.data.sources import cifar, idx
from allstep.errors import DataError

__all__ = [
    "FILES",
    "NAMED",
    "Found",
    "ImageSet",
    "NamedSet",
    "Images",
    "cache_folder",
    "find",
    "load",
    "named_set",
]


@dataclass(frozen=True)
class Found:
    """A named set and the folder that holds its files."""

    name: str
    title: str
    folder: Path
    files: tuple[Path, ...]
    layout: str = "idx"
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Images:
    """A labelled part of a set:

    `images` (n, height, width) or (n, height, width, channels); `labels` (n,), int64.
    """

    images: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    """A set in memory."""

    train: Images
    test: Images
    num_classes: int
    classes: tuple[str, ...] = ()
    """Names of the classes, or nothing where they are not known."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        height, width, *channels = self.train.images.shape[1:]
        return (*(channels or [1]), height, width)


def find(wanted: NamedSet, folder: Path | None = None, progress: Progress | None = None) -> Found:
    """Where `wanted` is; with `folder`, it must be there. Downloads it when it is nowhere else."""
    if folder is not None:
        return _found_in(wanted, folder)
    places = (cache_folder() / wanted.name, *wanted.folders)
    for place in places:
        if is_whole(wanted, place):
            return _found_in(wanted, place)
    looked = ", ".join(str(place) for place in places)
    if wanted.home is None:
        raise DataError(f"{wanted.title} is not in {looked}")
    try:
        get(wanted, places[0], progress=progress)
        return _found_in(wanted, places[0])
    except DataError as error:
        hint = (
            f" ({wanted.hint}, or give --data FOLDER)" if wanted.hint else " (give --data FOLDER)"
        )
        raise DataError(f"{wanted.title} is not in {looked}, and {error}{hint}") from error


def load(found: Found) -> ImageSet:
    """Reads the files and checks that they fit together."""
    train, test = _READ[found.layout](found.files)
    num_classes = int(train.labels.max()) + 1
    if test.labels.max() >= num_classes:
        raise DataError(
            f"{found.files[-1]}: expected labels 0 to {num_classes - 1}, found {test.labels.max()}"
        )
    classes = (
        found.classes if len(found.classes) == num_classes else ()
    )  # the user's folder may hold another set
    return ImageSet(train, test, num_classes, classes)


def _read_idx(files: tuple[Path, ...]) -> tuple[Images, Images]:
    train_images, train_labels, test_images, test_labels = files
    train = _images(train_images, train_labels)
    test = _images(test_images, test_labels)
    if train.images.shape[1:] != test.images.shape[1:]:
        expected, size = train.images.shape[1:], test.images.shape[1:]
        raise DataError(
            f"{test_images}: expected images of {expected} as in {train_images.name}, found {size}"
        )
    return train, test


def _read_cifar(files: tuple[Path, ...]) -> tuple[Images, Images]:
    *train, test = files
    return Images(*cifar.read(train)), Images(*cifar.read([test]))


_READ: Mapping[str, Callable[[tuple[Path, ...]], tuple[Images, Images]]] = {
    "idx": _read_idx,
    "cifar": _read_cifar,
}


def _images(image_file: Path, labels: Path) -> Images:
    images, numbers = idx.read_pair(image_file, labels)
    if images.ndim not in (3, 4):
        raise DataError(
            f"{image_file}: expected images with 3 or 4 dimensions, found shape {images.shape}"
        )
    if not len(images):
        raise DataError(f"{image_file}: has no images")
    if numbers.dtype.kind not in "iu" or numbers.min() < 0:
        raise DataError(
            f"{labels}: expected labels that are whole numbers from 0 on, found {numbers.dtype}"
            f" from {numbers.min()} on"
        )
    native = images.astype(
        images.dtype.newbyteorder("="), copy=False
    )  # bytes stay where they are, mapped or not
    return Images(native, numbers.astype(np.int64))


def _found_in(wanted: NamedSet, folder: Path) -> Found:
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder" if not folder.exists() else f"{folder}: is not a folder"
        )
    files = tuple(either(folder, name) or not_there(folder, name) for name in wanted.files)
    return Found(wanted.name, wanted.title, folder, files, wanted.layout, wanted.classes)
