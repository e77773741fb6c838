"""Files and folder listings of web servers, by requests whose responses are checked and limited.

| the server | result |
|---|---|
| answers a range with the whole file, or with another range | an error |
| sends no complete header within `LIMIT` seconds, redirects included | `SlowServer` |
| sends less than 1,000 bytes per second of a body, over `LIMIT` seconds | `SlowServer` |
| redirects in a circle, or to a protocol other than http(s) | an error with the address |
| sends a listing of more than 4 MB, or a compressed one | an error; nothing is decompressed |

`Web` has the methods of an fsspec file system that allstep calls. fsspec's own file system for http
reads a file to determine whether it is a folder, accepts any response for a range, and has a
timeout of five minutes. `Web` uses its event loop, its connection pool and the user's settings for
it.
"""

import asyncio
import html
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeAlias, cast
from urllib.parse import urldefrag, urljoin

import aiohttp
import fsspec
from fsspec.asyn import sync

from allstep.data.sources.files import SlowServer, WebError
from allstep.errors import DataError, cut

_Response: TypeAlias = aiohttp.ClientResponse

LIMIT = 20.0
"""Timeout in seconds for connection and header, and period over which body speed is measured."""
# Smallest accepted speed of a body, in bytes per second.
_MIN_SPEED = 1000
# Largest accepted listing, in bytes.
_MAX_LISTING = 4 << 20
_MAX_FOLDERS = 100
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)", re.IGNORECASE)
# All repetitions are limited: otherwise a hostile page could make the search quadratic.
_LINK = re.compile(r"""(?i)<a\s(?:[^<>]{0,500}?\s)?href\s{0,9}=\s{0,9}["']([^"'<>]{1,2000})""")
_MAGIC = re.compile(r"[*\[]")
# aiohttp has the second one since 3.10.
_NO_ADDRESS = (aiohttp.InvalidURL, getattr(aiohttp, "NonHttpUrlClientError", aiohttp.InvalidURL))


class Refused(WebError):
    """An error response of a server, with its HTTP status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the server answers {status} {cut(reason)}".rstrip())
        self.status = status


class Web:
    """The file system of http(s) URLs; a path is the whole URL."""

    def __init__(self) -> None:
        options = fsspec.config.conf.get("http", {}).get("client_kwargs", {})
        plain = {**options, "auto_decompress": False}
        self._system = fsspec.filesystem("http", client_kwargs=plain)

    def info(self, url: str) -> dict[str, Any]:
        """Return size and version of a file; raise DataError unless its server answers ranges."""
        return cast("dict[str, Any]", self._run(self._info, url))

    def cat_file(self, url: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`."""
        return cast(bytes, self._run(self._cat_file, url, start, end))

    def isdir(self, url: str) -> bool:
        """Return whether `url` is a folder listing, by its last character or its content type."""
        return url.endswith("/") or ("?" not in url and self._run(self._page, url) is not None)

    def ls(self, url: str, detail: bool = True) -> list[Any]:
        """Return the URLs that a listing links to inside its folder, as names or fsspec entries."""
        page = self._run(self._page, url)
        if page is None:
            raise DataError(f"{url}: expected a listing in HTML, found none; list the shards")
        folder = url.partition("?")[0].rstrip("/") + "/"
        links = (_inside(folder, html.unescape(link)) for link in _LINK.findall(page))
        names = sorted({name for name in links if name})
        kinds = ("file", "directory")
        entries = [{"name": name, "type": kinds[name.endswith("/")]} for name in names]
        return entries if detail else names

    def glob(self, pattern: str) -> list[str]:
        """Return the URLs that match a pattern, from the listings of its folders."""
        parts = pattern.split("/")
        first = next(number for number, part in enumerate(parts) if _MAGIC.search(part))
        folders = ["/".join(parts[:first]) + "/"]
        for part in parts[first:-1]:
            folders = [found for folder in folders for found in self._matches(folder, f"{part}/")]
            if len(folders) > _MAX_FOLDERS:
                many = f"expected at most {_MAX_FOLDERS} folders, found {len(folders)}"
                raise DataError(f"{pattern}: {many}")
        return [found for folder in folders for found in self._matches(folder, parts[-1])]

    def unstrip_protocol(self, url: str) -> str:
        """Return `url` unchanged: paths of this file system include the protocol."""
        return url

    def _matches(self, folder: str, pattern: str) -> list[str]:
        # fnmatch's "*" also matches "/", which would include the content of subfolders.
        depth = folder.count("/") + pattern.count("/")
        names = (name for name in self.ls(folder, detail=False) if name.count("/") == depth)
        return [name for name in names if fnmatchcase(name.removeprefix(folder), pattern)]

    def _run(self, act: Any, *given: Any) -> Any:
        return sync(self._system.loop, act, *given)

    @asynccontextmanager
    async def _response(self, url: str, span: str | None = None) -> AsyncIterator[_Response]:
        """Open the response to a GET of `url`, or of the range `span`; its body is not yet read."""
        options = self._system.kwargs
        headers = {**options.get("headers", {}), "Accept-Encoding": "identity"}
        if span is not None:
            headers["Range"] = f"bytes={span}"
        # `LIMIT` replaces aiohttp's timeouts: none of them detects a header that arrives byte by
        # byte.
        more = {**options, "headers": headers, "timeout": aiohttp.ClientTimeout(total=None)}
        try:
            async with asyncio.timeout(LIMIT):
                session = await self._system.set_session()
                response = await session.get(self._system.encode_url(url), **more)
        except TimeoutError as error:
            raise SlowServer(f"the server sends no complete header within {LIMIT:g} s") from error
        except aiohttp.TooManyRedirects as error:
            times = len(error.history)
            raise DataError(f"{url}: the server redirects more than {times} times") from error
        except _NO_ADDRESS as error:
            found = cut(str(error))
            redirect = f"the server redirects to {found}"
            what = "is not a valid web address" if found == url else redirect
            raise DataError(f"{url}: {what}; expected http:// or https:// and a host") from error
        async with response:
            if response.status in (404, 410):
                raise FileNotFoundError(url)
            if response.status >= 400 and response.status != 416:
                raise Refused(response.status, response.reason or "")
            yield response

    async def _info(self, url: str) -> dict[str, Any]:
        async with self._response(url, "0-0") as response:
            about = response.headers
            version = {"ETag": about.get("ETag"), "LastModified": about.get("Last-Modified")}
            if _is_empty(response):
                return {"size": 0, **version}
            total = _check_range(url, 0, 1, response)
            await _body(response, 1)
            return {"size": None if total == "*" else int(total), **version}

    async def _cat_file(self, url: str, start: int, end: int) -> bytes:
        async with self._response(url, f"{start}-{end - 1}") as response:
            _check_range(url, start, end, response)
            body = await _body(response, end - start)
        if len(body) != end - start:
            amount = "more" if len(body) > end - start else f"{len(body)} bytes"
            asked = f"requested bytes {start}-{end - 1}"
            raise DataError(f"{url}: {asked}, found {amount}; copy the file to this machine first")
        return body

    async def _page(self, url: str) -> str | None:
        """Return the text of a listing; None, without reading it, if the content is no HTML."""
        async with self._response(url) as response:
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind != "text/html" and (kind or not url.endswith("/")):
                return None
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding != "identity":
                found = f"found Content-Encoding {cut(encoding)!r}"
                raise DataError(f"{url}: expected a plain listing, {found}")
            body = await _body(response, _MAX_LISTING)
        if len(body) > _MAX_LISTING:
            wrong = f"expected a listing of at most {_MAX_LISTING} bytes, found more"
            raise DataError(f"{url}: {wrong}; list the shards")
        return body.decode(errors="replace")


def web() -> Web:
    """Return the `Web` of this process, which reuses its connections."""
    return _web_of(os.getpid())


@cache
def _web_of(pid: int) -> Web:
    # Per process: a forked process lacks the thread of its parent's event loop.
    return Web()


async def _body(response: _Response, limit: int) -> bytes:
    """Return the body; reading stops once it has more than `limit` bytes."""
    body = bytearray()
    while True:
        before = len(body)
        try:
            async with asyncio.timeout(LIMIT):
                while len(body) <= limit and (chunk := await response.content.readany()):
                    body += chunk
            return bytes(body)
        except TimeoutError as error:
            if len(body) - before < LIMIT * _MIN_SPEED:
                found = f"{len(body) - before} bytes in {LIMIT:g} s, expected {_MIN_SPEED} a second"
                raise SlowServer(f"the server sends too slowly: {found}") from error


def _is_empty(response: _Response) -> bool:
    """Return whether the response to a request for the first byte shows an empty file."""
    if response.status == 416:
        return response.headers.get("Content-Range", "").lower() == "bytes */0"
    return response.status == 200 and response.headers.get("Content-Length") == "0"


def _check_range(url: str, start: int, end: int, response: _Response) -> str:
    """Return the size of the file ("*": unknown); raise DataError unless the range is right."""
    header = response.headers.get("Content-Range", "")
    found = _RANGE.fullmatch(header.strip())
    if response.status == 206 and found and (int(found[1]), int(found[2])) == (start, end - 1):
        return found[3]
    what = f"status {response.status}" + (f" with Content-Range {cut(header)!r}" if header else "")
    asked = f"requested bytes {start}-{end - 1}, found {what}"
    wrong = f"the server does not answer range requests ({asked})"
    raise DataError(f"{url}: {wrong}; copy the file to this machine first")


def _inside(folder: str, link: str) -> str | None:
    """Return the URL of a `link` in the listing of `folder`; None if it is outside the folder."""
    try:
        url, _ = urldefrag(urljoin(folder, link))
    except ValueError:
        return None
    # Behind a proxy, a server that is reached by https may write its links with http.
    rest, here = url.partition("://")[2], folder.partition("://")[2]
    return folder + rest.removeprefix(here) if rest.startswith(here) and rest != here else None
