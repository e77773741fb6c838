"""Download one file over HTTP(S); the target appears complete and correct or not at all.

| the server | the download raises |
|---|---|
| sends over 1% more than the known size | an error at that byte, or earlier if the header has it |
| sends less than it announced | an error with the number of bytes expected and found |
| sends a web page: a login, or "not found" with status 200 | an error with its first bytes |
| resets or refuses the connection, or answers with an error | an error with the reason |
| is silent for `timeout` seconds, or sends under 60 KB in a minute | an error |
| sends no complete header within a minute, redirects included | an error |

The bytes go to a temporary file next to the target, are checked, and the file is then renamed
(`files.whole`). A cut connection, a silent server and a wrong checksum all raise a `DataError`
within seconds and leave no file behind. `locked` keeps the workers of one host from downloading the
same file at the same time: the first one downloads, the others wait and then use its file.
"""

import gzip
import hashlib
import os
import socket
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from allstep._version import __version__
from allstep.errors import DataError
from allstep.files import lock
from allstep.files.atomic import write_atomic
from allstep.process.thread_call import CallTimeout, call_within

_CHUNK = 1 << 18
# Seconds within which a header must be complete, and over which the speed is measured.
_TIMEOUT = 60.0
# Smallest accepted speed, in bytes per second.
_MIN_SPEED = 1000
_WEB_PAGE = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")

_Result = TypeVar("_Result")
Progress = Callable[[str, int, int | None], None]
"""Called during a download: file name, bytes so far, bytes in total (None if not announced)."""


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str,
    nbytes: int | None = None,
    progress: Progress | None = None,
    timeout: float = 5.0,
    unpack: bool = False,
) -> None:
    """Download `url` to `target`; raise DataError unless the SHA-256 of its content is `sha256`.

    With `unpack`, the checksum is that of the content unpacked by gzip, since compressing the same
    file again changes the packed bytes. `nbytes` is the known size of that content; the download
    stops 1% above it. `timeout` is the longest silence in seconds, connecting included; a slow but
    steady server may take longer.
    """
    with writing(target) as file:
        for chunk in _chunks(url, target.name, progress, timeout, max_size(nbytes)):
            file.write(chunk)
        check(file, sha256, url, unpack=unpack, nbytes=nbytes)


def max_size(nbytes: int | None) -> int | None:
    """Return the largest accepted size of a file whose content has `nbytes`: 1% and 1 KB more.

    gzip adds less than that to incompressible content.
    """
    return None if nbytes is None else nbytes + nbytes // 100 + 1024


@contextmanager
def writing(target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `target` if the block ends without an exception.

    Raise DataError for an error of the file system.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_atomic(target, sync=True) as file:
            yield file
    # This is an OSError too, but not one of writing.
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {error.strerror or error}") from error


def check(
    file: IO[bytes],
    expected: str | None,
    origin: str,
    *,
    unpack: bool = False,
    nbytes: int | None = None,
) -> None:
    """Raise DataError unless the whole content of `file` has the SHA-256 `expected` (None: any).

    `origin` names the file in the message. `nbytes` is the size of the right content; reading stops
    1% above it.
    """
    try:
        found, size = _content_sha256(file, unpack, max_size(nbytes))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{origin}: is not a complete gzip file ({error})") from error
    if expected is not None and found != expected:
        sizes = (
            f" ({nbytes} bytes), found {found} ({size} bytes)"
            if nbytes is not None
            else f", found {found}"
        )
        raise DataError(f"{origin}: wrong content: expected SHA-256 {expected}{sizes}")


def _content_sha256(file: IO[bytes], unpack: bool, limit: int | None) -> tuple[str, int]:
    """Return SHA-256 and size of a file's content, with `unpack` after unpacking it by gzip.

    Reading stops after `limit` bytes.
    """
    digest, size = hashlib.sha256(), 0
    file.seek(0)
    with gzip.open(file) if unpack else nullcontext(file) as content:
        while (limit is None or size <= limit) and (chunk := content.read(_CHUNK)):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


@contextmanager
def locked(folder: Path, timeout: float = 600.0) -> Iterator[None]:
    """Hold the lock of `folder`, so that only one process at a time fills it.

    Raise DataError if another process still holds it after `timeout` seconds.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(lock.locked(folder / ".lock", timeout))
        except lock.LockTaken as error:
            raise DataError(
                f"{folder}: another process has been filling it for {timeout:.0f} s"
            ) from error
        except OSError as error:
            raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
        yield


def _chunks(
    url: str, name: str, progress: Progress | None, timeout: float, limit: int | None
) -> Iterator[bytes]:
    """Yield the bytes at `url`, at most `limit`; raise a DataError of one line for any error."""
    done, total = 0, None
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"allstep/{__version__}"})
        with _short_resolver_timeout(), _opened(request, timeout) as response:
            total = _length(response)
            _check_amount(url, total or 0, limit)
            pace = _Pace(url)
            while chunk := _next_chunk(response):
                if not done:
                    _check_no_web_page(url, chunk)
                done += len(chunk)
                _check_amount(url, done, limit)
                pace.check(done)
                if progress:
                    progress(name, done, total)
                yield chunk
    except urllib.error.HTTPError as error:
        # The exception keeps the connection open.
        error.close()
        raise DataError(f"{url}: the server answers {error.code} {_line(error.reason)}") from error
    except (OSError, HTTPException) as error:
        raise DataError(
            f"{url}: cannot be downloaded: {_line(_reason(error))}, after {done} bytes"
        ) from error
    # urllib raises this for a malformed address.
    except ValueError as error:
        raise DataError(f"{_line(url)}: is not a valid web address: {_line(error)}") from error
    if total is not None and done != total:
        raise DataError(f"{url}: the connection was cut: expected {total} bytes, found {done}")


def _opened(request: urllib.request.Request, timeout: float) -> HTTPResponse:
    """Return the response after all redirects, once its header is complete."""
    opened = _within_timeout(urllib.request.urlopen, request, timeout=timeout)
    return cast(HTTPResponse, opened)


def _next_chunk(response: HTTPResponse) -> bytes:
    """Return some bytes of the body, b"" at its end."""
    try:
        # The line with the length of a chunk may arrive byte by byte, as a header may.
        return _within_timeout(response.read1, _CHUNK)
    except _Late:
        # Closing a response waits for a thread that reads it: end that read first.
        with socket.socket(fileno=os.dup(response.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        raise


class _Late(TimeoutError):
    """A header that is not complete within `_TIMEOUT`."""


def _within_timeout(call: Callable[..., _Result], *given: Any, **named: Any) -> _Result:
    """Return the result of `call`; raise `_Late` if it takes longer than `_TIMEOUT`.

    A socket's timeout restarts with every byte, so that a server which sends a byte now and then
    never exceeds it. The call therefore runs in a thread. A late thread is abandoned, and ends with
    its connection.
    """
    try:
        return call_within(partial(call, *given, **named), _TIMEOUT, "allstep-fetch")
    except CallTimeout:
        slow = f"the server sends too slowly: no complete header within {_TIMEOUT:g} s"
        raise _Late(slow) from None


class _Pace:
    """The speed of a download, measured over `_TIMEOUT` seconds at a time."""

    def __init__(self, url: str) -> None:
        self._url, self._since, self._done = url, time.monotonic(), 0

    def check(self, done: int) -> None:
        """Raise DataError if the last minute was too slow; `done` is the bytes so far."""
        seconds, came = time.monotonic() - self._since, done - self._done
        if seconds < _TIMEOUT:
            return
        if came < seconds * _MIN_SPEED:
            slow = f"{came} bytes in {seconds:.0f} s, expected {_MIN_SPEED} a second"
            raise DataError(f"{self._url}: the server sends too slowly: {slow}, after {done} bytes")
        self._since, self._done = time.monotonic(), done


def _check_amount(url: str, nbytes: int, limit: int | None) -> None:
    if limit is not None and nbytes > limit:
        raise DataError(
            f"{url}: the server sends too much: expected at most {limit} bytes, found {nbytes} or"
            " more"
        )


def _check_no_web_page(url: str, head: bytes) -> None:
    if head.lstrip().lower().startswith(_WEB_PAGE):
        raise DataError(
            f"{url}: expected a file, found a web page that begins with {head.lstrip()[:40]!r}; "
            "check the address, or whether a proxy requires a login"
        )


@contextmanager
def _short_resolver_timeout() -> Iterator[None]:
    """Limit the system's resolver to 2 s per name server.

    The timeout of a socket does not cover the lookup of its host name.
    """
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
    """Return the announced size of the body; None if there is none or it is no size of a file."""
    header = response.headers.get("Content-Length") or ""
    # int() raises for thousands of digits.
    is_size = header.isascii() and header.isdigit() and len(header) < 20
    return int(header) if is_size else None


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)


def _line(text: object) -> str:
    """Return the text of a server or library as part of one printable line."""
    line = " ".join(str(text).split())[:200]
    return "".join(each if each.isprintable() else "?" for each in line)
