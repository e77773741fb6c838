"""Brings the files of a named set into a folder: from another folder, from a URL, or from the set's
home.

```
origin                          has                                          what happens
folder                          the files, plain or .gz, or the archive      copied / unpacked
http(s)://.../                  the files as .gz, or the archive             downloaded, unpacked from the archive
http(s)://.../NAME.tar.gz       the archive itself                           downloaded, unpacked
```

Every file goes to a temporary name first and is renamed when the SHA-256 of its content is right. A
second call only brings what is missing, after a look at what is there: a file with the right name
and other content may be the user's own, so it is refused, neither taken for good nor written over.
Nothing is downloaded, copied or unpacked beyond its known size and 1%. One process at a time fills
a folder, and removes what a killed one left half written.
"""

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from allstep.data.sets.catalogue import NamedSet, either, is_whole
from allstep.data.sets.http import Progress, check, fetch, locked, most, writing
from allstep.errors import DataError
from allstep.files.atomic import remove_leftovers

_CHUNK = 1 << 20
# Python's tarfile raises ValueError for numbers that cannot be, and RecursionError for long chains
# of extended headers.
_BROKEN_ARCHIVE = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    OSError,
    ValueError,
    RecursionError,
)
_NAMES = {
    "idx": "classes.txt",
    "cifar": "batches.meta.txt",
}  # where a source of that layout looks for names of classes


def get(
    wanted: NamedSet,
    folder: Path,
    origin: str | Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Fills `folder` with the files of `wanted` that it lacks.

    `origin` is a folder or URL; else a folder where this system keeps the set, else the set's home.
    """
    origin = origin or _near(wanted) or wanted.home
    if origin is None:
        raise DataError(
            f"{wanted.title} has no home on the web; give the folder or URL that has it"
        )
    with locked(folder):
        _remove_parts(wanted, folder)
        _check_there(wanted, folder)
        if is_whole(
            wanted, folder
        ):  # another worker may have been here while we waited for the lock
            return
        if str(origin).startswith(("http://", "https://")):
            _from_web(wanted, folder, str(origin), progress)
        else:
            _from_folder(wanted, folder, Path(origin), progress)
        if wanted.classes:
            (folder / _NAMES[wanted.layout]).write_text(
                "".join(f"{name}\n" for name in wanted.classes)
            )


def _remove_parts(wanted: NamedSet, folder: Path) -> None:
    """Removes what a killed process left in `folder`; the lock says that nobody writes there now."""
    if wanted.archive:
        _packed(wanted, folder).unlink(missing_ok=True)
    remove_leftovers(folder)


def _packed(wanted: NamedSet, folder: Path) -> Path:
    """Where the archive lies until it is unpacked."""
    assert wanted.archive is not None
    return folder / f".{wanted.archive.name}"


def _check_there(wanted: NamedSet, folder: Path) -> None:
    """Raises DataError when a file in `folder` is not what its name says."""
    for name in wanted.files:
        if path := either(folder, name):
            try:
                with _opened(path) as file:
                    known = wanted.nbytes.get(name)
                    check(
                        file,
                        wanted.sha256.get(name),
                        str(path),
                        unpack=path.suffix == ".gz",
                        nbytes=known,
                    )
            except DataError as error:
                raise DataError(
                    f"{error}; remove it, or choose another folder for {wanted.title}"
                ) from error


def _near(wanted: NamedSet) -> Path | None:
    return next((folder for folder in wanted.folders if is_whole(wanted, folder)), None)


def _from_web(wanted: NamedSet, folder: Path, url: str, progress: Progress | None) -> None:
    if wanted.archive is None:
        for name in _missing(wanted, folder):
            target = folder / f"{name}.gz"
            known = wanted.nbytes.get(name)
            fetch(
                f"{url}{name}.gz",
                target,
                sha256=wanted.sha256[name],
                nbytes=known,
                progress=progress,
                unpack=True,
            )
        return
    if not url.endswith((".tar.gz", ".tgz")):
        url = f"{url.removesuffix('/')}/{wanted.archive.name}"
    packed = _packed(wanted, folder)
    try:
        fetch(
            url,
            packed,
            sha256=wanted.archive.sha256,
            nbytes=wanted.archive.nbytes,
            progress=progress,
        )
        _unpack(wanted, folder, packed, url)
    finally:
        packed.unlink(missing_ok=True)


def _from_folder(wanted: NamedSet, folder: Path, origin: Path, progress: Progress | None) -> None:
    if not origin.is_dir():
        raise DataError(
            f"{origin}: is not a folder" if origin.exists() else f"{origin}: no such folder"
        )
    if wanted.archive and (origin / wanted.archive.name).is_file() and not is_whole(wanted, origin):
        _unpack(wanted, folder, origin / wanted.archive.name, str(origin / wanted.archive.name))
        return
    for name in _missing(wanted, folder):
        path = either(origin, name) or not_there(origin, name)
        with _opened(path) as file:
            _store(
                file,
                folder / path.name,
                str(path),
                wanted.sha256.get(name),
                wanted.nbytes.get(name),
            )
        if progress:
            progress(path.name, path.stat().st_size, path.stat().st_size)


def _missing(wanted: NamedSet, folder: Path) -> list[str]:
    return [name for name in wanted.files if not either(folder, name)]


def not_there(folder: Path, name: str) -> Path:
    """Raises the error that says what `folder` has instead of the file `name`."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    there = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    raise DataError(f"{folder}: expected {name} or {name}.gz, found {there or 'nothing'}")


def _unpack(wanted: NamedSet, folder: Path, packed: Path, origin: str) -> None:
    """Takes the set's files out of an archive, by their names alone: nothing in it can say where
    they go."""
    try:
        with tarfile.open(packed, "r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                if (
                    member.isfile()
                    and name in wanted.files
                    and (file := archive.extractfile(member))
                ):
                    _store(
                        file,
                        folder / name,
                        f"{origin}: {name}",
                        wanted.sha256[name],
                        wanted.nbytes.get(name),
                    )
    except _BROKEN_ARCHIVE as error:
        raise DataError(f"{origin}: is not a whole archive ({str(error)[:200]})") from error
    if lacking := _missing(wanted, folder):
        raise DataError(f"{origin}: the archive lacks {', '.join(lacking)}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _store(
    file: IO[bytes], target: Path, origin: str, sha256: str | None, nbytes: int | None
) -> None:
    """Copies `file` to `target`, which appears whole and with the right content or not at all."""
    size, limit = 0, most(nbytes)
    with writing(target) as copy:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            if limit is not None and size > limit:
                raise DataError(
                    f"{origin}: is too large: expected at most {limit} bytes, found {size} or more"
                )
            copy.write(chunk)
        check(copy, sha256, origin, unpack=target.suffix == ".gz", nbytes=nbytes)
