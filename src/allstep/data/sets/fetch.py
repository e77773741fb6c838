"""Downloads one file over HTTP(S), so that it is whole and right or not there at all.

The bytes go to a temporary file beside the target, are checked, and are then renamed (`whole`). A cut connection, a server that stops
talking and a wrong checksum all end in a `DataError` within seconds, with nothing left behind. `locked` keeps the workers of one
host from downloading the same thing at once: the first one does, the others wait and then find it there.
"""

import gzip
import hashlib
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from allstep._version import __version__
from allstep.data.whole import write_whole
from allstep.errors import DataError

_CHUNK = 1 << 18

Progress = Callable[[str, int, int | None], None]
"""Told, as a download goes on: the file's name, bytes so far, bytes in all (None when the server does not say)."""


def fetch(
    url: str, target: Path, *, sha256: str, progress: Progress | None = None, timeout: float = 5.0, unpack: bool = False
) -> None:
    """Downloads `url` to `target` if the SHA-256 of its content is `sha256`.

    With `unpack` the checksum is that of the content unpacked by gzip: packing the same file again changes the packed bytes. `timeout`
    is the longest silence in seconds, from the connection on; a slow but steady server may take longer.
    """
    with writing(target) as file:
        for chunk in _chunks(url, target.name, progress, timeout):
            file.write(chunk)
        check(file, sha256, url, unpack=unpack)


@contextmanager
def writing(target: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `target` when all went well; what the system refuses is a DataError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_whole(target) as file:
            yield file
    except gzip.BadGzipFile:  # an OSError, too, but it says nothing of writing
        raise
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from error


def check(file: IO[bytes], expected: str | None, origin: str, *, unpack: bool = False) -> None:
    """Raises DataError unless the content of `file`, from its beginning, has the SHA-256 `expected`; None is right with any."""
    try:
        found = content_sha256(file, unpack=unpack)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{origin}: is not a whole gzip file ({error})") from error
    if expected is not None and found != expected:
        raise DataError(f"{origin}: wrong content: expected SHA-256 {expected}, found {found}")


def content_sha256(file: IO[bytes], *, unpack: bool) -> str:
    """SHA-256 of all that is in a file, unpacked by gzip first if asked."""
    digest = hashlib.sha256()
    file.seek(0)
    with gzip.open(file) if unpack else nullcontext(file) as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def locked(folder: Path, timeout: float = 600.0) -> Iterator[None]:
    """Only one process at a time fills `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=timeout)
        lock.acquire()
    except Timeout as error:
        raise DataError(f"{folder}: another process has been filling it for {timeout:.0f} s") from error
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        lock.release()


def _chunks(url: str, name: str, progress: Progress | None, timeout: float) -> Iterator[bytes]:
    request = urllib.request.Request(url, headers={"User-Agent": f"allstep/{__version__}"})
    done = 0
    try:
        with _impatient_resolver(), urllib.request.urlopen(request, timeout=timeout) as response:
            total = _length(response)
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                if progress:
                    progress(name, done, total)
                yield chunk
    except urllib.error.HTTPError as error:
        raise DataError(f"{url}: the server answers {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise DataError(f"{url}: cannot be downloaded: {_reason(error)}, after {done} bytes") from error
    if total is not None and done != total:
        raise DataError(f"{url}: the connection was cut: expected {total} bytes, found {done}")


@contextmanager
def _impatient_resolver() -> Iterator[None]:
    """The system's resolver gives up after 2 s a name server: a socket's time-out does not count while a name is looked up."""
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = f"{before or ''} timeout:2 attempts:1".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before


def _length(response: HTTPResponse) -> int | None:
    header = response.headers.get("Content-Length")
    return int(header) if header and header.isdigit() else None


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)
