"""Downloads one file over HTTP(S), so that it is whole and right or not there at all.

| the server | ends with |
|---|---|
| sends more than the known size and 1% | an error as soon as it does, or at once if it announces so |
| sends less | an error that says how much is missing |
| sends a web page: a login, or "not found" with status 200 | an error that says so |
| resets the connection, refuses it, or answers with an error | its reason |
| says nothing for `timeout` seconds, or less than 60 KB in a minute | an error |
| sends no complete header within a minute, redirects included | an error |

The bytes go to a temporary file beside the target, are checked, and are then renamed (`whole`). A
cut connection, a server that stops talking and a wrong checksum all end in a `DataError` within
seconds, with nothing left behind. `locked` keeps the workers of one host from downloading the same
thing at once: the first one does, the others wait and then find it there.
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
_PATIENCE, _SLOWEST = 60.0, 1000  # seconds, and bytes a second over that time
_WEB_PAGE = (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")

_Result = TypeVar("_Result")
Progress = Callable[[str, int, int | None], None]
"""Told, as a download goes on: the file's name, bytes so far, bytes in all (None when the server
does not say)."""


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
    """Downloads `url` to `target` if the SHA-256 of its content is `sha256`.

    With `unpack` the checksum is that of the content unpacked by gzip: packing the same file again
    changes the packed bytes. `nbytes` is the known size of that content; no more than 1% above it
    is downloaded. `timeout` is the longest silence in seconds, from the connection on; a slow but
    steady server may take longer.
    """
    with writing(target) as file:
        for chunk in _chunks(url, target.name, progress, timeout, most(nbytes)):
            file.write(chunk)
        check(file, sha256, url, unpack=unpack, nbytes=nbytes)


def most(nbytes: int | None) -> int | None:
    """How many bytes are taken of a file whose content has `nbytes`: 1% more.

    gzip adds less than that to what it cannot compress.
    """
    return None if nbytes is None else nbytes + nbytes // 100 + 1024


@contextmanager
def writing(target: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes `target` when all went well; what the system refuses is a
    DataError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_atomic(target, sync=True) as file:
            yield file
    except gzip.BadGzipFile:  # an OSError, too, but it says nothing of writing
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
    """Raises DataError unless the content of `file`, from its beginning, has the SHA-256
    `expected`; None is right with any.

    `nbytes` is the size of the right content: of more than that and 1% nothing is read.
    """
    try:
        found, size = _content_sha256(file, unpack, most(nbytes))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{origin}: is not a whole gzip file ({error})") from error
    if expected is not None and found != expected:
        sizes = (
            f" ({nbytes} bytes), found {found} ({size} bytes)"
            if nbytes is not None
            else f", found {found}"
        )
        raise DataError(f"{origin}: wrong content: expected SHA-256 {expected}{sizes}")


def _content_sha256(file: IO[bytes], unpack: bool, limit: int | None) -> tuple[str, int]:
    """Return SHA-256 and size of what is in a file, unpacked by gzip first if asked.

    Reading stops behind `limit` bytes.
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
    """Only one process at a time fills `folder`."""
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
    """The bytes at `url`, up to `limit` of them; whatever goes wrong is a DataError of one line."""
    done, total = 0, None
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"allstep/{__version__}"})
        with _impatient_resolver(), _opened(request, timeout) as response:
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
        error.close()  # it holds the connection
        raise DataError(f"{url}: the server answers {error.code} {_line(error.reason)}") from error
    except (OSError, HTTPException) as error:
        raise DataError(
            f"{url}: cannot be downloaded: {_line(_reason(error))}, after {done} bytes"
        ) from error
    except ValueError as error:  # what urllib raises for an address that cannot be
        raise DataError(f"{_line(url)}: is no address of a file: {_line(error)}") from error
    if total is not None and done != total:
        raise DataError(f"{url}: the connection was cut: expected {total} bytes, found {done}")


def _opened(request: urllib.request.Request, timeout: float) -> HTTPResponse:
    """Return the answer, all redirects followed, once its header is complete."""
    opened = _within_patience(urllib.request.urlopen, request, timeout=timeout)
    return cast(HTTPResponse, opened)


def _next_chunk(response: HTTPResponse) -> bytes:
    """Return some bytes of the body, b"" at its end."""
    try:
        # The line with the length of a chunk may drip like a header.
        return _within_patience(response.read1, _CHUNK)
    except _Late:
        # To close a response waits for a thread that reads it: end its reading first.
        with socket.socket(fileno=os.dup(response.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
        raise


class _Late(TimeoutError):
    """An answer that is not complete in time."""


def _within_patience(act: Callable[..., _Result], *given: Any, **named: Any) -> _Result:
    """Return what `act` does, if it does so within `_PATIENCE`; raise `_Late` otherwise.

    A socket's timeout starts again with every byte, so a thread waits for a server that sends one
    now and then. A thread that is late is left behind, and ends with its connection.
    """
    try:
        return call_within(partial(act, *given, **named), _PATIENCE, "allstep-fetch")
    except CallTimeout:
        slow = f"the server sends too slowly: no complete header within {_PATIENCE:g} s"
        raise _Late(slow) from None


class _Pace:
    """Notices a server that sends so slowly that the download would not end."""

    def __init__(self, url: str) -> None:
        self._url, self._since, self._done = url, time.monotonic(), 0

    def check(self, done: int) -> None:
        """Raise DataError when the last minute brought too little; `done`: bytes so far."""
        seconds, came = time.monotonic() - self._since, done - self._done
        if seconds < _PATIENCE:
            return
        if came < seconds * _SLOWEST:
            slow = f"{came} bytes in {seconds:.0f} s, expected {_SLOWEST} a second"
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
            "check the address, or whether a proxy asks for a login"
        )


@contextmanager
def _impatient_resolver() -> Iterator[None]:
    """The system's resolver gives up after 2 s a name server: a socket's time-out does not count
    while a name is looked up."""
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
    # Of a number that is no size of a file nothing is known; int() refuses thousands of digits.
    return (
        int(header)
        if header and header.isascii() and header.isdigit() and len(header) < 20
        else None
    )


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)


def _line(text: object) -> str:
    """What a server or a library says, as a part of one line."""
    words = " ".join(str(text).split())[:200]
    return "".join(each if each.isprintable() else "?" for each in words)
