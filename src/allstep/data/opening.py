"""`open_source`: a source from a path, by looking at what is there.

```
a source                          is taken as it is
x.tfrecord*, train-00000-of-01024 a file, pattern, URL or list of them             TFRecordSource
x.tar, x.tar.gz, x.tgz            the same                                         TarSource
a folder of TFRecords or tars     all of them; here or behind a URL                TFRecordSource, TarSource
a folder with data_batch_*.bin    CIFAR-10 as published                            CifarSource      train=False: test_batch.bin
a folder with idx files           MNIST and its like                               IdxSource        train=False: t10k-*
a folder of folders               class folders                                    FolderSource
x-images-idx3-ubyte               one idx file of images, its labels beside it   IdxSource
synthetic:1000x224x224            so many made-up images of that size            SyntheticSource
```

Whatever does not fit is a DataError that says what was found.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from allstep.data.sources.arrays import CifarSource, IdxSource
from allstep.data.sources.files import is_remote, local_path
from allstep.data.sources.folder import FolderSource
from allstep.data.sources.index import Progress
from allstep.data.sources.shards import Where, check_complete, expand_braces, list_folder
from allstep.data.sources.source import Source
from allstep.data.sources.synthetic import is_synthetic, synthetic
from allstep.data.sources.tar.source import TarSource, is_tar
from allstep.data.sources.tfrecord.source import TFRecordSource, is_tfrecord
from allstep.errors import DataError

_IMAGES, _LABELS = "-images-idx3-ubyte", "-labels-idx1-ubyte"
_UNREAD = (".tar.xz", ".tar.bz2", ".tar.zst", ".tar.lz4", ".txz", ".tbz2")
_TEST = ("t10k", "test_batch")
_KINDS = "TFRecord files, tar files, idx files, CIFAR-10's *.bin files or class folders"


def open_source(
    where: Where | Source,
    *,
    features: Mapping[str, str] | None = None,
    labels_from: int | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] = (),
    check: bool = True,
    train: bool = True,
    progress: Progress | None = None,
) -> Source:
    """The samples at `where`, whatever they are.

    `features`, `labels_from` and `check` are TFRecordSource's, `num_classes` is that of records,
    tars and made-up images. `classes` numbers labels of records and tars that are names, where
    there is no `classes.txt`: those of the training set. `train` chooses between the two parts of a
    folder that holds both, as CIFAR-10's and MNIST's do. `progress` hears of indexes that must be
    built.
    """
    if isinstance(where, Source):
        return where
    if where == "":  # Path("") would be the current folder
        raise DataError("no place is given: expected a file, folder, pattern or URL")
    if isinstance(where, str) and is_synthetic(where):
        return synthetic(where, num_classes)

    def records(where: Where) -> Source:
        return TFRecordSource(
            where,
            features,
            labels_from=labels_from,
            num_classes=num_classes,
            classes=classes,
            check=check,
            progress=progress,
        )

    def tars(where: Where) -> Source:
        return TarSource(where, num_classes=num_classes, classes=classes, progress=progress)

    if folder := _folder(where):
        return _open_folder(folder, records, tars, train, progress)
    return _open_files(where, records, tars, train)


def _folder(where: Where) -> Path | None:
    if not isinstance(where, str | Path) or is_remote(where):
        return None
    path = local_path(where)
    return path if path.is_dir() else None


def holds_class_folders(folder: Path) -> bool:
    """Whether folders in this one are classes of images: there are no records, archives or arrays
    beside them."""
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    arrays = _is_cifar(names) or _idx_images(names, train=True) is not None
    return (
        folder.is_dir()
        and not arrays
        and not any(is_tfrecord(name) or is_tar(name) for name in names)
    )


def _open_folder(
    folder: Path,
    records: Callable[[Where], Source],
    tars: Callable[[Where], Source],
    train: bool,
    progress: Progress | None,
) -> Source:
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    names = [path.name for path in entries if path.is_file()]
    _check_one_kind(str(folder), names)
    if any(map(is_tfrecord, names)):
        return _all_of(folder, records, train)
    if any(map(is_tar, names)):
        return _all_of(folder, tars, train)
    if _is_cifar(names):
        return CifarSource(folder if train else folder / "test_batch.bin")
    if images := _idx_images(names, train):
        return _idx_pair(folder / images)
    if any(path.is_dir() for path in entries):
        return _all_of(folder, lambda where: FolderSource(str(where), progress=progress), train)
    raise DataError(f"{folder}: expected {_KINDS}, found {_some([path.name for path in entries])}")


def _check_one_kind(folder: str, names: Sequence[str]) -> None:
    """DataError for a folder of which only some shards would be read."""
    shards = [name for name in names if is_tfrecord(name) or is_tar(name)]
    other = [name for name in shards if is_tfrecord(name) != is_tfrecord(shards[0])]
    if other:
        raise DataError(
            f"{folder}: holds TFRecord files and tar files ({shards[0]}, {other[0]}): name those to"
            " read by a pattern"
        )
    unread = [name for name in names if name.lower().endswith(_UNREAD)]
    if shards and unread:
        raise DataError(
            f"{folder}: {_some(unread)}: tar files are read as .tar, .tar.gz and .tgz; pack them"
            " so, or name those to read by a pattern"
        )


def _is_cifar(names: Sequence[str]) -> bool:
    return any(name.startswith("data_batch") and name.endswith(".bin") for name in names)


def _all_of(where: Where, opened: Callable[[Where], Source], train: bool) -> Source:
    """What has no test part cannot give one: the training set in its place would be a score too
    good to be true."""
    if not train:
        raise DataError(
            f"{where}: only folders of idx files and CIFAR-10's have a test part; name the place of"
            " the test set itself"
        )
    return opened(where)


def _open_files(
    where: Where, records: Callable[[Where], Source], tars: Callable[[Where], Source], train: bool
) -> Source:
    first = str(where) if isinstance(where, str | Path) else str(next(iter(where), ""))
    name = next(expand_braces(first)).rstrip("/").rpartition("/")[2]
    if is_tar(name):
        return _all_of(where, tars, train)
    if is_tfrecord(name):
        return _all_of(where, records, train)
    if not train and not name.startswith(_TEST):
        return _all_of(where, records, train)
    if name.endswith(".bin"):
        return CifarSource(where)
    if _is_idx(name):
        return _idx_pair(local_path(first))
    if is_remote(first) and (listed := list_folder(first)) is not None:
        return _open_remote(first, listed, records, tars)
    if (
        not is_remote(first)
        and not local_path(first).exists()
        and not any(mark in first for mark in "*?[")
    ):
        raise DataError(f"{first}: no such file or folder")
    raise DataError(
        f"{first}: is not known by its name as one of {_KINDS}; say which: TFRecordSource(...),"
        " TarSource(...)"
    )


def _open_remote(
    url: str, listed: list[str], records: Callable[[Where], Source], tars: Callable[[Where], Source]
) -> Source:
    """A folder behind a URL: of TFRecords or tars.

    What is read from the disk only, class folders and arrays, is said to be so.
    """
    names = {one.rstrip("/").rpartition("/")[2]: one for one in listed}
    _check_one_kind(url, list(names))
    for is_shard, opened in ((is_tfrecord, records), (is_tar, tars)):
        if shards := [
            names[name] for name in sorted(names) if is_shard(name) and not name.startswith(".")
        ]:
            check_complete(url.rstrip("/"), [name for name in names if is_shard(name)])
            return opened(shards)
    remedy = "copy it to this machine (then `allstep data pack` makes such files)"
    raise DataError(
        f"{url}: behind a URL only TFRecord and tar files are read, found {_some(sorted(names))};"
        f" {remedy}"
    )


def _is_idx(name: str) -> bool:
    return name.removesuffix(".gz").endswith(_IMAGES)


def _idx_images(names: list[str], train: bool) -> str | None:
    """The file of images for training, or the one for testing (t10k); the only one for training,
    if there is only one."""
    images = [name for name in names if _is_idx(name)]
    wanted = [name for name in images if name.startswith("t10k") is not train]
    return next(iter(wanted or (images if train and len(images) == 1 else [])), None)


def _idx_pair(images: Path) -> IdxSource:
    stem = images.name.removesuffix(".gz").removesuffix(_IMAGES) + _LABELS
    labels = next(
        (
            path
            for path in (images.with_name(stem), images.with_name(f"{stem}.gz"))
            if path.is_file()
        ),
        None,
    )
    if labels is None:
        raise DataError(f"{images}: expected its labels beside it: {stem} or {stem}.gz")
    return IdxSource(images, labels)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "nothing"
