"""`open_source`: choose the source class for a path from its name or from the files in the folder.

```
given                              opened as         reads
a source                           the same object
x.tfrecord*, train-00000-of-01024  TFRecordSource    a file, pattern, URL or list of these
x.tar, x.tar.gz, x.tgz             TarSource         a file, pattern, URL or list of these
a folder of TFRecord or tar files  the same two      all of its shards; also of a remote folder
a folder with data_batch_*.bin     CifarSource       CIFAR-10 as published
                                                     train=False: test_batch.bin
a folder with idx files            IdxSource         MNIST and datasets in its format
                                                     train=False: t10k-*
a folder of folders                FolderSource      class folders
x-images-idx3-ubyte                IdxSource         an idx file of images, labels next to it
synthetic:1000x224x224             SyntheticSource   1000 generated images of 224 x 224
```

Any other path raises a DataError that lists what was found.
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
    """Return the source that reads the samples at `where`, chosen by file name or folder content.

    - `where`: a file, folder, pattern, URL, list of these, "synthetic:..." text, or an open source.
    - `features`, `labels_from`, `check`: for TFRecord files; see `TFRecordSource`.
    - `num_classes`: the number of classes, for TFRecord files, tar files and synthetic images.
    - `classes`: class names in label order, for TFRecord and tar files whose labels are names and
      that have no `classes.txt`; pass the classes of the training split for a test split.
    - `train`: which split of a folder to read that holds both, as CIFAR-10's and MNIST's do.
    - `progress`: a function called with (name, done, total) while an index is built.
    """
    if isinstance(where, Source):
        return where
    # Path("") would be the current folder
    if where == "":
        raise DataError("no path given: expected a file, folder, pattern or URL")
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
    """Return the path of `where` if it is a local folder."""
    if not isinstance(where, str | Path) or is_remote(where):
        return None
    path = local_path(where)
    return path if path.is_dir() else None


def holds_class_folders(folder: Path) -> bool:
    """Return whether subfolders of `folder` are classes of images.

    They are not if `folder` also contains TFRecord, tar, idx or CIFAR-10 files.
    """
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
    """Raise DataError for a folder of which only some shards would be read."""
    shards = [name for name in names if is_tfrecord(name) or is_tar(name)]
    other = [name for name in shards if is_tfrecord(name) != is_tfrecord(shards[0])]
    if other:
        raise DataError(
            f"{folder}: contains both TFRecord files and tar files ({shards[0]}, {other[0]});"
            " select one kind with a pattern"
        )
    unread = [name for name in names if name.lower().endswith(_UNREAD)]
    if shards and unread:
        raise DataError(
            f"{folder}: cannot read {_some(unread)}, expected .tar, .tar.gz or .tgz; pack them as"
            " one of these, or select the other files with a pattern"
        )


def _is_cifar(names: Sequence[str]) -> bool:
    return any(name.startswith("data_batch") and name.endswith(".bin") for name in names)


def _all_of(where: Where, opened: Callable[[Where], Source], train: bool) -> Source:
    """Open `where`, or raise DataError if a test split is requested: this format has none.

    The training split in its place would give a score that is too good.
    """
    if not train:
        raise DataError(
            f"{where}: only folders of idx files and of CIFAR-10 contain a test split; give the"
            " path of the test split itself"
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
        f"{first}: expected the name of {_KINDS}; open a file with another name by"
        " TFRecordSource(...) or TarSource(...)"
    )


def _open_remote(
    url: str, listed: list[str], records: Callable[[Where], Source], tars: Callable[[Where], Source]
) -> Source:
    """Open a remote folder of TFRecord or tar files.

    Raise DataError for class folders and arrays, which are read from the local disk only.
    """
    urls = {one.rstrip("/").rpartition("/")[2]: one for one in listed}
    _check_one_kind(url, list(urls))
    for is_shard, opened in ((is_tfrecord, records), (is_tar, tars)):
        names = list(filter(is_shard, urls))
        if shards := [urls[name] for name in sorted(names) if not name.startswith(".")]:
            check_complete(url.rstrip("/"), names)
            return opened(shards)
    remedy = "copy it to this machine (`allstep data pack` can then write such files)"
    raise DataError(
        f"{url}: only TFRecord and tar files are read from a URL, found {_some(sorted(urls))};"
        f" {remedy}"
    )


def _is_idx(name: str) -> bool:
    return name.removesuffix(".gz").endswith(_IMAGES)


def _idx_images(names: list[str], train: bool) -> str | None:
    """Return the name of the idx file with the images of the training or the test split (t10k).

    A single file of images is the training split, whatever its name.
    """
    images = [name for name in names if _is_idx(name)]
    wanted = [name for name in images if name.startswith("t10k") is not train]
    return next(iter(wanted or (images if train and len(images) == 1 else [])), None)


def _idx_pair(images: Path) -> IdxSource:
    """Open the idx file `images` with the file of labels in the same folder."""
    stem = images.name.removesuffix(".gz").removesuffix(_IMAGES) + _LABELS
    candidates = (images.with_name(stem), images.with_name(f"{stem}.gz"))
    labels = next((path for path in candidates if path.is_file()), None)
    if labels is None:
        raise DataError(f"{images}: expected its labels in the same folder: {stem} or {stem}.gz")
    return IdxSource(images, labels)


def _some(names: list[str]) -> str:
    """Return the first five names and the number of the others, for a message."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "nothing"
