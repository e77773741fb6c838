"""Files with random access: local ones are mapped, remote ones are read by ranges.

```
open_file("x.tfrecord")          -> LocalFile     read() returns a view of the mapped file,
                                                  without a copy or system call
open_file("s3://bucket/x.tar")   -> RemoteFile    read() requests exactly that range, by fsspec
```

Both have a `size` and a `stamp`, from which an index detects that the file has changed since the
index was built: size and modification time of a local file, size and the server's ETag (or time)
of a remote one. Both may be read by many threads at once.
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
"""Identifies one version of a file; values that JSON can hold."""

_WAITS = (0.2, 1.0)
"""Seconds before the second and third attempt to read a range, for short network failures."""
PROTOCOLS = (
    *("file", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl"),
    *("hf", "hdfs", "webhdfs", "memory"),
)
"""Protocols of URLs that are opened. fsspec supports more, some of which treat a URL as
instructions: `reference://` opens further URLs that it finds in a file, `ssh://` and `dask://`
connect to hosts. A config may come from another person, so only protocols that name one file of a
store are allowed."""
_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError)
"""Errors of a read that another attempt would repeat."""
_RETRY_TIMEOUT = 30.0
"""Seconds after which a range that a web server sends too slowly is not requested again."""


class WebError(OSError):
    """An error of a web server, whose text is a complete message."""


class SlowServer(WebError):
    """A web server that does not send its response within the timeout."""


class File(ABC):
    """A file that is read at any offset."""

    name: str
    size: int
    stamp: Stamp

    @abstractmethod
    def read(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset` on; fewer only at the end of the file."""


class LocalFile(File):
    """A local file, mapped into memory."""

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
    """A file at a URL of one of `PROTOCOLS`, read by ranges through fsspec or `Web`."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._system, self._path = remote(url)
        self.stamp = _remote_stamp(url, self._system, self._path)
        self.size = self.stamp["size"]
        # The stamp needed the first byte only. Some servers answer any range from there on, and
        # some announce a wrong size: check the last byte.
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
            # Each file system of fsspec has its own exceptions.
            except Exception as error:
                late = isinstance(error, SlowServer) and time.monotonic() - since > _RETRY_TIMEOUT
                if wait is None or late or isinstance(error, _PERMANENT):
                    why = f"bytes {offset} to {end} cannot be read: {reason_of(error)}"
                    raise DataError(f"{self.name}: {why}") from error
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")


def open_file(where: str | Path) -> File:
    """Open the file at a path or URL."""
    return RemoteFile(str(where)) if is_remote(where) else LocalFile(local_path(where))


def is_absent(where: str | Path, error: BaseException | None) -> bool:
    """Return whether opening `where` failed with `error` because there is no such file.

    A dangling symbolic link counts as a file.
    """
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
    """Return the stamp of a file without opening it."""
    if is_remote(where):
        return _remote_stamp(str(where), *remote(str(where)))
    try:
        return _local_stamp(local_path(where).stat())
    except OSError as error:
        raise DataError(f"{where}: {error.strerror or error}") from error


def check_unchanged(names: Sequence[str], before: Sequence[Stamp], now: Sequence[Stamp]) -> None:
    """Raise DataError if the stamp of a file differs from the one `before`.

    In a changed file, a sample number could mean different samples in different processes.
    """
    for name, old, new in zip(names, before, now, strict=True):
        if old != new:
            raise DataError(
                f"{name}: was changed after it was opened (it was {dict(old)}, is {dict(new)});"
                " start again"
            )


def is_remote(where: str | Path) -> bool:
    """Return whether `where` is a URL, other than a `file://` one."""
    return "://" in str(where) and not str(where).startswith("file://")


def is_web(url: str) -> bool:
    """Return whether `url` is that of a web server (http or https)."""
    return url.startswith(("http://", "https://"))


def local_path(where: str | Path) -> Path:
    """Return the path of a local file, given as path or `file://`; raise DataError for a URL."""
    if is_remote(where):
        kinds = "only TFRecord and tar files are read from a URL"
        remedy = "copy it to this machine (`allstep data pack` can then write such files)"
        raise DataError(f"{where}: {kinds}; {remedy}")
    return expand_home(str(where).removeprefix("file://"))


def lockable(where: str | Path) -> Path | None:
    """Return the path to lock while an index or copy of a file is built; None for a URL."""
    return None if is_remote(where) else local_path(where)


def check_protocol(url: str) -> None:
    """Raise DataError unless `url` has one of `PROTOCOLS` and is no chain (`cache::s3://`)."""
    protocol = url.partition("://")[0]
    allowed = f"allowed are {', '.join(PROTOCOLS)}"
    if "::" in url:
        chain = "URLs chained by '::' are not supported; give a single URL"
        raise DataError(f"{cut(url)}: {chain}; {allowed}")
    if protocol not in PROTOCOLS:
        unknown = f"URLs of the protocol {cut(protocol)!r} are not supported"
        raise DataError(f"{cut(url)}: {unknown}; {allowed}")


def remote(url: str) -> tuple[Any, str]:
    """Return the file system for `url`, fsspec's or `Web`, and the path of `url` in it."""
    check_protocol(url)
    try:
        if is_web(url):
            # Imported here: it takes 300 ms, which other files need not pay.
            from allstep.data.sources.web import web

            return web(), url
        # Imported here: it takes 50 ms, which local files need not pay.
        import fsspec

        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    # Its message names the package to install.
    except ImportError as error:
        raise DataError(f"{url}: {error}") from error
    except Exception as error:
        raise DataError(f"{url}: fsspec cannot open this URL: {reason_of(error)}") from error


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
            f"{url}: the server does not report its size, so it cannot be read by ranges; copy it"
            " to this machine first"
        )
    keys = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
    version = next((info[key] for key in keys if info.get(key)), "")
    return {"size": _size(url, info["size"]), "version": str(version)}


def _size(url: str, announced: Any) -> int:
    """Return the size that a server announced; raise DataError if it is no size of a file."""
    try:
        size = int(announced)
    except (ValueError, TypeError, OverflowError):
        size = -1
    if size < 0:
        raise DataError(
            f"{url}: expected the server to report its size in bytes, found {str(announced)[:40]!r}"
        )
    return size


def reason_of(error: BaseException) -> str:
    """Return the text of a file system's error, as part of a message."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    text = str(error) if isinstance(error, WebError) else f"{type(error).__name__}: {error}"
    return cut(" ".join(text.split()), 300)
