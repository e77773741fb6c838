"""Copy or download the files of a named dataset into a folder.

```
origin                       has                                       action
folder                       the files, plain or .gz, or the archive   copy; unpack the archive
http(s)://.../               the files as .gz, or the archive          download; unpack the archive
http(s)://.../NAME.tar.gz    the archive itself                        download and unpack it
```

Every file is written under a temporary name and renamed once the SHA-256 of its content is correct.
A second call fetches only the missing files, after it has checked the others: a file with a known
name and different content may be the user's own, so it is an error and is not overwritten. A
download, copy or unpacking stops 1% above the known size. One process at a time fills a folder, and
removes the incomplete files of processes that were killed.
"""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from allstep.data.sets.catalogue import NamedSet, find_file, is_whole
from allstep.data.sets.http import Progress, check, fetch, locked, max_size, writing
from allstep.errors import DataError
from allstep.files.atomic import remove_leftovers

_CHUNK = 1 << 20
# Python's tarfile raises ValueError for impossible numbers, and RecursionError for long chains of
# extended headers.
_BROKEN_ARCHIVE = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    OSError,
    ValueError,
    RecursionError,
)
# File in which a source of the layout looks for class names.
_CLASSES_FILE = {"idx": "classes.txt", "cifar": "batches.meta.txt"}


def get(
    wanted: NamedSet,
    folder: Path,
    origin: str | Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Copy or download the files of `wanted` that `folder` lacks.

    `origin` is a folder or URL (default: a folder where the system stores the dataset, else its web
    address). `progress` is called with (file name, bytes so far, bytes in total or None).
    """
    origin = origin or _system_folder(wanted) or wanted.home
    if origin is None:
        raise DataError(f"{wanted.title} has no web address; give a folder or URL that contains it")
    with locked(folder):
        _remove_incomplete(wanted, folder)
        _check_present(wanted, folder)
        # Another worker may have filled the folder while this one waited for the lock.
        if is_whole(wanted, folder):
            return
        if str(origin).startswith(("http://", "https://")):
            _from_web(wanted, folder, str(origin), progress)
        else:
            _from_folder(wanted, folder, Path(origin), progress)
        if wanted.classes:
            lines = "".join(f"{name}\n" for name in wanted.classes)
            (folder / _CLASSES_FILE[wanted.layout]).write_text(lines)


def _remove_incomplete(wanted: NamedSet, folder: Path) -> None:
    """Remove the incomplete files of killed processes from `folder`.

    The caller holds the lock, so no other process is writing there.
    """
    if wanted.archive:
        _packed(wanted, folder).unlink(missing_ok=True)
    remove_leftovers(folder)


def _packed(wanted: NamedSet, folder: Path) -> Path:
    """Return the path of the downloaded archive until it is unpacked."""
    assert wanted.archive is not None
    return folder / f".{wanted.archive.name}"


def _check_present(wanted: NamedSet, folder: Path) -> None:
    """Raise DataError if a file in `folder` has the name but not the content of the dataset's."""
    for name in wanted.files:
        if path := find_file(folder, name):
            sha256, nbytes = wanted.sha256.get(name), wanted.nbytes.get(name)
            try:
                with _opened(path) as file:
                    check(file, sha256, str(path), unpack=path.suffix == ".gz", nbytes=nbytes)
            except DataError as error:
                raise DataError(
                    f"{error}; remove it, or choose another folder for {wanted.title}"
                ) from error


def _system_folder(wanted: NamedSet) -> Path | None:
    """Return the first of the dataset's system folders that has all files."""
    return next((folder for folder in wanted.folders if is_whole(wanted, folder)), None)


def _from_web(wanted: NamedSet, folder: Path, url: str, progress: Progress | None) -> None:
    """Download the missing files from `url`, one by one or as the archive."""
    archive = wanted.archive
    if archive is None:
        for name in _missing(wanted, folder):
            fetch(
                f"{url}{name}.gz",
                folder / f"{name}.gz",
                sha256=wanted.sha256[name],
                nbytes=wanted.nbytes.get(name),
                progress=progress,
                unpack=True,
            )
        return
    if not url.endswith((".tar.gz", ".tgz")):
        url = f"{url.removesuffix('/')}/{archive.name}"
    packed = _packed(wanted, folder)
    try:
        fetch(url, packed, sha256=archive.sha256, nbytes=archive.nbytes, progress=progress)
        _unpack(wanted, folder, packed, url)
    finally:
        packed.unlink(missing_ok=True)


def _from_folder(wanted: NamedSet, folder: Path, origin: Path, progress: Progress | None) -> None:
    """Copy the missing files from the folder `origin`, or unpack its archive."""
    if not origin.is_dir():
        raise DataError(
            f"{origin}: is not a folder" if origin.exists() else f"{origin}: no such folder"
        )
    if wanted.archive and (origin / wanted.archive.name).is_file() and not is_whole(wanted, origin):
        _unpack(wanted, folder, origin / wanted.archive.name, str(origin / wanted.archive.name))
        return
    for name in _missing(wanted, folder):
        path = find_file(origin, name) or raise_missing(origin, name)
        sha256, nbytes = wanted.sha256.get(name), wanted.nbytes.get(name)
        with _opened(path) as file:
            _store(file, folder / path.name, str(path), sha256, nbytes)
        if progress:
            progress(path.name, path.stat().st_size, path.stat().st_size)


def _missing(wanted: NamedSet, folder: Path) -> list[str]:
    """Return the names of the dataset's files that `folder` lacks."""
    return [name for name in wanted.files if not find_file(folder, name)]


def raise_missing(folder: Path, name: str) -> Path:
    """Raise a DataError that lists what `folder` contains instead of the file `name`."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    there = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise DataError(f"{folder}: expected {name} or {name}.gz, found {there or 'nothing'}")


def _unpack(wanted: NamedSet, folder: Path, packed: Path, origin: str) -> None:
    """Write the dataset's files of an archive into `folder`, by their file names only.

    Folder names in the archive are ignored, so no member is written outside `folder`.
    """
    try:
        with tarfile.open(packed, "r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                if not member.isfile() or name not in wanted.files:
                    continue
                if file := archive.extractfile(member):
                    sha256, nbytes = wanted.sha256[name], wanted.nbytes.get(name)
                    _store(file, folder / name, f"{origin}: {name}", sha256, nbytes)
    except _BROKEN_ARCHIVE as error:
        raise DataError(f"{origin}: is not a complete archive ({str(error)[:200]})") from error
    if lacking := _missing(wanted, folder):
        raise DataError(f"{origin}: the archive lacks {', '.join(lacking)}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for reading; raise DataError for an error of the file system."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _store(
    file: IO[bytes], target: Path, origin: str, sha256: str | None, nbytes: int | None
) -> None:
    """Copy `file` to `target`, which appears complete and with the right content or not at all."""
    size, limit = 0, max_size(nbytes)
    with writing(target) as copy:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            if limit is not None and size > limit:
                raise DataError(
                    f"{origin}: is too large: expected at most {limit} bytes, found {size} or more"
                )
            copy.write(chunk)
        check(copy, sha256, origin, unpack=target.suffix == ".gz", nbytes=nbytes)
