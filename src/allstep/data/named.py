"""Data sets known by name, and where they are found.

A set is four idx files. They are looked for in this order, and the first place that has all four is taken:

1. the folder the user gave (`--data`): then nothing else will do, and what is missing or wrong there is an error;
2. our cache folder (`ALLSTEP_CACHE`, else the user's cache folder);
3. folders where the system keeps the set (Debian's package `dataset-fashion-mnist`), or this package's own for the digits;
4. the set's home on the web, downloaded into the cache; only content with the right SHA-256 gets there.

`find` answers where, `load` reads and checks. Neither needs torch, so a launcher can say what is wrong before any worker starts.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from platformdirs import user_cache_path

from allstep.data import idx
from allstep.data.fetch import Progress, fetch, locked
from allstep.errors import ConfigError, DataError, did_you_mean

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class NamedSet:
    """What is known of a data set before it is found."""

    name: str
    title: str
    folders: tuple[Path, ...] = ()
    home: str | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of each file's unpacked content: Debian's gzip files differ from the home's, what is in them does not."""
    hint: str = ""


@dataclass(frozen=True)
class Found:
    """A named set and the folder that holds its four files."""

    name: str
    title: str
    folder: Path
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Pictures:
    """A labelled part of a set: `images` (n, height, width) or (n, channels, height, width); `labels` (n,), int64."""

    images: NDArray[Any]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    """A set in memory."""

    train: Pictures
    test: Pictures
    num_classes: int

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one picture."""
        shape = self.train.images.shape[1:]
        return (1, *shape) if len(shape) == 2 else shape


NAMED: Mapping[str, NamedSet] = {
    "fashion-mnist": NamedSet(
        name="fashion-mnist",
        title="Fashion-MNIST",
        folders=(Path("/usr/share/datasets/fashion-mnist"),),
        home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        sha256={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        hint="on Debian: apt install dataset-fashion-mnist",
    ),
    "digits": NamedSet(
        name="digits",
        title="8x8 digits",
        folders=(Path(__file__).parent / "digits",),
    ),
}


def named_set(name: str) -> NamedSet:
    """The set called `name`."""
    if name not in NAMED:
        raise ConfigError(f"no data set is called {name!r}; {did_you_mean(name, NAMED)}")
    return NAMED[name]


def cache_folder() -> Path:
    """Where downloads are kept."""
    asked = os.environ.get("ALLSTEP_CACHE")
    return Path(asked) if asked else user_cache_path("allstep")


def find(wanted: NamedSet, folder: Path | None = None, progress: Progress | None = None) -> Found:
    """Where `wanted` is; with `folder`, it must be there. Downloads it when it is nowhere else."""
    if folder is not None:
        return _found_in(wanted, folder)
    places = (cache_folder() / wanted.name, *wanted.folders)
    for place in places:
        if _is_whole(place):
            return _found_in(wanted, place)
    looked = ", ".join(str(place) for place in places)
    if wanted.home is None:
        raise DataError(f"{wanted.title} is not in {looked}")
    try:
        return _download(wanted, places[0], progress)
    except DataError as error:
        hint = f" ({wanted.hint}, or give --data FOLDER)" if wanted.hint else " (give --data FOLDER)"
        raise DataError(f"{wanted.title} is not in {looked}, and {error}{hint}") from error


def load(found: Found) -> ImageSet:
    """Reads the four files and checks that they fit together."""
    train_images, train_labels, test_images, test_labels = found.files
    train = _pictures(train_images, train_labels)
    test = _pictures(test_images, test_labels)
    if train.images.shape[1:] != test.images.shape[1:]:
        expected, size = train.images.shape[1:], test.images.shape[1:]
        raise DataError(f"{test_images}: expected pictures of {expected} as in {train_images.name}, found {size}")
    num_classes = int(train.labels.max()) + 1
    if test.labels.max() >= num_classes:
        raise DataError(f"{test_labels}: expected labels 0 to {num_classes - 1}, found {test.labels.max()}")
    return ImageSet(train, test, num_classes)


def _pictures(images: Path, labels: Path) -> Pictures:
    pictures, numbers = idx.read_pair(images, labels)
    if pictures.ndim not in (3, 4):
        raise DataError(f"{images}: expected pictures with 3 or 4 dimensions, found shape {pictures.shape}")
    if not len(pictures):
        raise DataError(f"{images}: has no pictures")
    if numbers.dtype.kind not in "iu" or numbers.min() < 0:
        raise DataError(
            f"{labels}: expected labels that are whole numbers from 0 on, found {numbers.dtype} from {numbers.min()} on"
        )
    native = pictures.astype(pictures.dtype.newbyteorder("="), copy=False)  # bytes stay where they are, mapped or not
    return Pictures(native, numbers.astype(np.int64))


def _is_whole(folder: Path) -> bool:
    return all(_either(folder, name) for name in FILES)


def _either(folder: Path, name: str) -> Path | None:
    """The file called `name` in `folder`, plain or packed."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _found_in(wanted: NamedSet, folder: Path) -> Found:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: is not a folder")
    files = tuple(_either(folder, name) or _missing(folder, name) for name in FILES)
    return Found(wanted.name, wanted.title, folder, files)


def _missing(folder: Path, name: str) -> Path:
    names = sorted(path.name for path in folder.iterdir())
    there = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise DataError(f"{folder}: expected {name} or {name}.gz, found {there or 'nothing'}")


def _download(wanted: NamedSet, folder: Path, progress: Progress | None) -> Found:
    with locked(folder):
        for name in FILES:
            if not _either(folder, name):  # another worker may have been here while we waited for the lock
                target = folder / f"{name}.gz"
                fetch(f"{wanted.home}{name}.gz", target, sha256=wanted.sha256[name], progress=progress, unpack=True)
    return _found_in(wanted, folder)
