"""Find the files of named datasets, and read their images into memory.

The files of a dataset (`catalogue`) are searched in this order; the first folder that has all of
them is used:

1. the folder that the user gave (`--data`): no other folder is tried, and a missing or wrong file
   there is an error;
2. allstep's cache folder (`ALLSTEP_CACHE`, else the user's cache folder);
3. folders where the system stores the dataset (Debian's package `dataset-fashion-mnist`), or the
   folder of this package with the digits;
4. the dataset's web address: the files are downloaded into the cache (`download`) if their SHA-256
   is right.

`find` returns the folder, `load` reads and checks the files. Neither imports torch, so a launcher
can report an error before any worker starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep.data.cache import cache_folder
from allstep.data.sets.catalogue import FILES, NAMED, NamedSet, find_file, is_whole, named_set
from allstep.data.sets.download import get, raise_missing
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
    """A named dataset and the folder that contains its files."""

    name: str
    """Name in configs and commands, such as "cifar10"."""
    title: str
    """Name in messages, such as "CIFAR-10"."""
    folder: Path
    """Folder that contains the files."""
    files: tuple[Path, ...]
    """Paths of the files, in the order of `NamedSet.files`."""
    layout: str = "idx"
    """Format of the files: "idx" or "cifar"."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in label order."""


@dataclass(frozen=True)
class Images:
    """The images and labels of one split.

    `images` has shape (n, height, width) or (n, height, width, channels), `labels` (n,).
    """

    images: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    """A dataset in memory: its training and test splits."""

    train: Images
    """The training split."""
    test: Images
    """The test split."""
    num_classes: int
    """Number of classes, which is the largest training label plus 1."""
    classes: tuple[str, ...] = ()
    """Names of the classes in label order, or () if they are not known."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of one image."""
        height, width, *channels = self.train.images.shape[1:]
        return (*(channels or [1]), height, width)


def find(wanted: NamedSet, folder: Path | None = None, progress: Progress | None = None) -> Found:
    """Return the folder and files of `wanted`; download it if no folder on this host has it.

    With `folder`, only that folder is searched. `progress` is called during a download with (file
    name, bytes so far, bytes in total or None).
    """
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
    """Read the files that `found` names; raise DataError if they do not match each other."""
    train, test = _READ[found.layout](found.files)
    num_classes = int(train.labels.max()) + 1
    if test.labels.max() >= num_classes:
        raise DataError(
            f"{found.files[-1]}: expected labels 0 to {num_classes - 1}, found {test.labels.max()}"
        )
    # The user's folder may contain another dataset in the same format.
    classes = found.classes if len(found.classes) == num_classes else ()
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
            f"{labels}: expected labels that are integers from 0 on, found {numbers.dtype} from"
            f" {numbers.min()} on"
        )
    # Elements of one byte are not copied, so that mapped files stay mapped.
    native = images.astype(images.dtype.newbyteorder("="), copy=False)
    return Images(native, numbers.astype(np.int64))


def _found_in(wanted: NamedSet, folder: Path) -> Found:
    if not folder.is_dir():
        raise DataError(
            f"{folder}: no such folder" if not folder.exists() else f"{folder}: is not a folder"
        )
    files = tuple(find_file(folder, name) or raise_missing(folder, name) for name in wanted.files)
    return Found(wanted.name, wanted.title, folder, files, wanted.layout, wanted.classes)
