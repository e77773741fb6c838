"""One file, read at any place: a local one through memory, one behind a URL by ranges.

```
open_file("x.tfrecord")          -> LocalFile     read() is a view of the mapped file: no copy, no system call
open_file("s3://bucket/x.tar")   -> RemoteFile    read() asks for just that range, through fsspec
```

Both know their `size` and a `stamp`, by which an index notices that the file is no longer the one
it was made for: size and time of the last change for a local file, size and the server's ETag (or
time) for a remote one. Both are read from many threads at once.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from allstep.data.sources.mapping import map_file
from allstep.errors import DataError, cut
from allstep.files.home import expand_home

Stamp = Mapping[str, Any]
"""What a file is recognised by; plain values that JSON can hold."""

_WAITS = (0.2, 1.0)
"""Seconds before the second and the third try to read a range: networks have hiccups."""
PROTOCOLS = (
    *("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"),
    *("hf", "hdfs", "webhdfs", "memory"),
)
"""Protocols of URLs that are opened. fsspec knows more, and some of them read a URL as
instructions: `reference://` opens further URLs that it finds in a file, `ssh://` and `dask://`
connect to hosts. A config may come from another person, so only those that name one file of a store
are used."""
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError)
_PATIENCE = 30.0
"""Seconds after which a range that a web server sends too slowly is not asked for again."""


class WebError(OSError):
    """What a web server does wrong; its text is complete."""


class SlowServer(WebError):
    """A web server that does not send its answer in time."""


class File(ABC):
    """Bytes by place."""

    name: str
    size: int
    stamp: Stamp

    @abstractmethod
    def read(self, offset: int, length: int) -> memoryview:
        """Up to `length` bytes from `offset` on: fewer only where the file ends."""


class LocalFile(File):
    """A file of this machine, mapped."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        try:
            self.view, found = map_file(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        self.size = found.st_size
        self.stamp = _local_stamp(found)

    def read(self, offset: int, length: int) -> memoryview:
        return self.view[offset : offset + length]


class RemoteFile(File):
    """A file behind a URL that fsspec knows."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._system, self._path = remote(url)
        self.stamp = _remote_stamp(url, self._system, self._path)
        self.size = self.stamp["size"]
        # The stamp needed the first byte only. Some servers answer every range from there on, and
        # some give a size that is not the file's.
        if is_web(url) and self.size:
            self.read(self.size - 1, 1)

    def read(self, offset: int, length: int) -> memoryview:
        since = time.monotonic()
        end = min(offset + length, self.size)
        if end <= offset:
            return memoryview(b"")
        for wait in (*_WAITS, None):
            try:
                return memoryview(self._system.cat_file(self._path, start=offset, end=end))
            except DataError:
                raise
            except Exception as error:  # each of fsspec's many systems has errors of its own
                late = isinstance(error, SlowServer) and time.monotonic() - since > _PATIENCE
                if wait is None or late or isinstance(error, _LASTING):
                    why = f"bytes {offset} to {end} cannot be read: {reason_of(error)}"
                    raise DataError(f"{self.name}: {why}") from error
                time.sleep(wait)
        raise AssertionError("the last try gives or raises")


def open_file(where: str | Path) -> File:
    """The file at a path or URL."""
    return RemoteFile(str(where)) if is_remote(where) else LocalFile(local_path(where))


def is_absent(where: str | Path, error: BaseException | None) -> bool:
    """Whether opening a file failed with `error` because there is none; a link to nothing is one."""
    if not is_remote(where):
        return not os.path.lexists(local_path(where)) and isinstance(error, FileNotFoundError)
    return is_missing(error) or is_refused(error)


def is_missing(error: BaseException | None) -> bool:
    """Return whether a server answered that it has no such file."""
    return isinstance(error, FileNotFoundError) or getattr(error, "status", None) in (404, 410)


def is_refused(error: BaseException | None) -> bool:
    """Return whether a server refused a file without stating whether it has it.

    Object stores whose content may not be listed do so for every name: S3 answers 403.
    """
    return isinstance(error, PermissionError) or getattr(error, "status", None) == 403


def stamp_of(where: str | Path) -> Stamp:
    """The stamp of a file that need not be opened for it."""
    if is_remote(where):
        return _remote_stamp(str(where), *remote(str(where)))
    try:
        return _local_stamp(local_path(where).stat())
    except OSError as error:
        raise DataError(f"{where}: {error.strerror or error}") from error


def check_unchanged(names: Sequence[str], before: Sequence[Stamp], now: Sequence[Stamp]) -> None:
    """An error, when one of the files is not the one it was `before`: numbers of samples could then
    mean others in another process."""
    for name, old, new in zip(names, before, now, strict=True):
        if old != new:
            raise DataError(
                f"{name}: was changed after it was opened (it was {dict(old)}, is {dict(new)});"
                " start again"
            )


def is_remote(where: str | Path) -> bool:
    """Whether `where` is a URL of something else than a local file."""
    return "://" in str(where) and not str(where).startswith("file://")


def is_web(url: str) -> bool:
    """Whether `url` is one of a web server."""
    return url.startswith(("http://", "https://"))


def local_path(where: str | Path) -> Path:
    """The path of a local file, given as such or as `file://`."""
    if is_remote(where):
        kinds = "behind a URL only TFRecord and tar files are read"
        raise DataError(
            f"{where}: {kinds}; copy it to this machine (then `allstep data pack` makes such files)"
        )
    return expand_home(str(where).removeprefix("file://"))


def lockable(where: str | Path) -> Path | None:
    """Return what to lock while something is made of a file: its path, or None behind a URL."""
    return None if is_remote(where) else local_path(where)


def check_protocol(url: str) -> None:
    """DataError unless `url` is of one of `PROTOCOLS`, and no chain (`simplecache::s3://...`)."""
    protocol = url.partition("://")[0]
    allowed = f"allowed are {', '.join(PROTOCOLS)}"
    if "::" in url:
        chain = "URLs chained by '::' are not opened; give a single URL"
        raise DataError(f"{cut(url)}: {chain}; {allowed}")
    if protocol not in PROTOCOLS:
        unknown = f"URLs of the protocol {cut(protocol)!r} are not opened"
        raise DataError(f"{cut(url)}: {unknown}; {allowed}")


def remote(url: str) -> tuple[Any, str]:
    """Return the file system for `url`, fsspec's or `Web`, and the path of `url` in it."""
    check_protocol(url)
    try:
        if is_web(url):
            # 300 ms that other files need not pay
            from allstep.data.sources.web import web

            return web(), url
        import fsspec  # 50 ms that local files need not pay

        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except ImportError as error:  # its message names the package to install
        raise DataError(f"{url}: {error}") from error
    except Exception as error:
        raise DataError(f"{url}: is no URL that fsspec can open: {reason_of(error)}") from error


def _local_stamp(found: os.stat_result) -> Stamp:
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _remote_stamp(url: str, system: Any, path: str) -> Stamp:
    try:
        info = system.info(path)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{url}: {reason_of(error)}") from error
    if info.get("size") is None:
        raise DataError(
            f"{url}: the server does not say how long it is, so it cannot be read by ranges; copy"
            " it here first"
        )
    version = next(
        (
            info[key]
            for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
            if info.get(key)
        ),
        "",
    )
    return {"size": _size(url, info["size"]), "version": str(version)}


def _size(url: str, told: Any) -> int:
    try:
        size = int(told)
    except (ValueError, TypeError, OverflowError):
        size = -1
    if size < 0:
        raise DataError(
            f"{url}: expected the server to give its size in bytes, found {str(told)[:40]!r}"
        )
    return size


def reason_of(error: BaseException) -> str:
    """Return what a file system's error says, as a part of a message."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    text = str(error) if isinstance(error, WebError) else f"{type(error).__name__}: {error}"
    return cut(" ".join(text.split()), 300)
