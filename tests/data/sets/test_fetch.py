"""Downloads from a real server on this machine: complete and right, or no file."""

import contextlib
import gzip
import hashlib
import re
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from allstep.data.sets import http as fetching
from allstep.data.sets.catalogue import NAMED
from allstep.data.sets.http import fetch, locked
from allstep.errors import DataError

CONTENT = bytes(range(256)) * 4000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
        elif self.path == "/silent":
            self.server.asked_to_end.wait()  # type: ignore[attr-defined]
        elif self.path == "/cut":
            self.answer(CONTENT[: len(CONTENT) // 2])
        elif self.path == "/packed":
            self.answer(gzip.compress(CONTENT), length=None)
        elif self.path == "/much":
            self.answer(CONTENT * 2, length=2 * len(CONTENT))
        elif self.path == "/endless":
            self.send_without_end()
        elif self.path == "/short":
            self.answer(CONTENT[:-1], length=None)
        elif self.path == "/bomb":
            self.answer(gzip.compress(bytes(100 * len(CONTENT))), length=None)
        elif self.path == "/page":
            self.answer(b"\n<!DOCTYPE html><html>log in first</html>", length=None)
        elif self.path == "/reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
        elif self.path == "/digits":
            self.answer(CONTENT, length="9" * 5000)
        elif self.path == "/minus":
            self.answer(CONTENT, length=-5)
        elif self.path == "/shouting":
            self.send_error(418, "tea\x1b[31m " + "x" * 5000)
        elif self.path == "/slow":
            self.drip()
        elif self.path == "/header":
            self.drip_after(b"HTTP/1.1 200 OK\r\nX-A: ")
        elif self.path == "/chunks":
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            self.drip_after(head + b"5\r\nhello\r\n5;")
        else:
            self.answer(CONTENT)

    def send_without_end(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.asked_to_end.is_set():  # type: ignore[attr-defined]
                self.wfile.write(CONTENT)

    def drip(self) -> None:
        """A byte now and then, never as long as a time-out apart."""
        self.send_response(200)
        self.end_headers()
        self.drip_after(b"")

    def drip_after(self, head: bytes) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(head)
            while not self.server.asked_to_end.wait(0.05):  # type: ignore[attr-defined]
                self.wfile.write(b"x")

    def answer(self, content: bytes, length: int | str | None = len(CONTENT)) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def home() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked_to_end = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.asked_to_end.set()  # type: ignore[attr-defined]
        server.shutdown()


def assert_nothing_in(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def test_a_good_download(home: str, tmp_path: Path) -> None:
    target, reported = tmp_path / "new" / "file", []
    fetch(f"{home}/file", target, sha256=SHA256, progress=lambda *figures: reported.append(figures))
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["file"]
    (tmp_path / "usual").touch()
    assert target.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert reported[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in reported] == sorted(done for _, done, _ in reported)


def test_the_checksum_may_be_that_of_the_unpacked_content(home: str, tmp_path: Path) -> None:
    fetch(f"{home}/packed", tmp_path / "file.gz", sha256=SHA256, unpack=True)
    assert gzip.decompress((tmp_path / "file.gz").read_bytes()) == CONTENT


@pytest.mark.parametrize(
    ("path", "complaint"),  # the silent server never answers: without a time-out this would not end
    [
        ("missing", "the server answers 404"),
        ("cut", "cut: expected 1024000 bytes, found 512000|512000 bytes read"),
        ("silent", "timed out"),
    ],
)
def test_what_fails_leaves_nothing(home: str, tmp_path: Path, path: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        fetch(f"{home}/{path}", tmp_path / "file", sha256=SHA256, timeout=0.5)
    assert_nothing_in(tmp_path)


def test_wrong_content_is_refused(home: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("the old one")
    with pytest.raises(
        DataError, match=f"wrong content: expected SHA-256 {'0' * 64}, found {SHA256}"
    ):
        fetch(f"{home}/file", tmp_path / "file", sha256="0" * 64)
    with pytest.raises(DataError, match="not a complete gzip file"):
        fetch(f"{home}/file", tmp_path / "file", sha256=SHA256, unpack=True)
    assert (tmp_path / "file").read_text() == "the old one"


def test_no_server_listens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Connection refused"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", sha256=SHA256)
    with pytest.raises(DataError, match="cannot be downloaded"):
        fetch("http://nowhere.invalid/file", tmp_path / "file", sha256=SHA256)
    assert_nothing_in(tmp_path)


def test_a_folder_that_cannot_be_written(home: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"), locked(tmp_path / "file" / "folder"):
        pass


@pytest.mark.usefixtures("processes")
def test_one_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(DataError, match="another process"),
        locked(tmp_path, timeout=0.05),
    ):
        pass
    with locked(tmp_path):
        pass


LIMIT = len(CONTENT) + len(CONTENT) // 100 + 1024


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (
            "much",
            (
                f"the server sends too much: expected at most {LIMIT} bytes, found"
                f" {2 * len(CONTENT)} or more"
            ),
        ),
        ("endless", f"the server sends too much: expected at most {LIMIT} bytes, found 1"),
        ("short", f"wrong content: expected SHA-256 {SHA256} ({len(CONTENT)} bytes), found"),
        ("page", "expected a file, found a web page that begins with b'<!DOCTYPE html>"),
        ("reset", "cannot be downloaded: "),
        ("shouting", "the server answers 418 tea?[31m xxx"),
    ],
)
def test_a_server_that_does_not_send_the_file(
    home: str, tmp_path: Path, path: str, complaint: str
) -> None:
    with pytest.raises(DataError, match=re.escape(complaint)) as caught:
        fetch(f"{home}/{path}", tmp_path / "file", sha256=SHA256, nbytes=len(CONTENT))
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()
    assert_nothing_in(tmp_path)


def test_a_gzip_bomb_is_unpacked_no_further_than_the_known_size(home: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found \w+ \(1[0-9]{6} bytes\)"):
        fetch(f"{home}/bomb", tmp_path / "file.gz", sha256=SHA256, nbytes=len(CONTENT), unpack=True)
    assert_nothing_in(tmp_path)


@pytest.mark.parametrize("path", ["digits", "minus"])
def test_a_length_that_is_none_is_not_used(home: str, tmp_path: Path, path: str) -> None:
    with contextlib.suppress(DataError):  # Python's own client may refuse it
        fetch(f"{home}/{path}", tmp_path / "file", sha256=SHA256, nbytes=len(CONTENT))
        assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_that_only_drips(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_TIMEOUT", 0.3)
    with pytest.raises(
        DataError, match=r"the server sends too slowly: \d+ bytes in \d+ s, expected 1000 a second"
    ):
        fetch(f"{home}/slow", tmp_path / "file", sha256=SHA256, nbytes=len(CONTENT))
    assert_nothing_in(tmp_path)


@pytest.mark.parametrize(("path", "done"), [("header", 0), ("chunks", 5)])
def test_a_server_that_drips_what_is_no_content(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, done: int
) -> None:
    monkeypatch.setattr(fetching, "_TIMEOUT", 0.3)
    slow = f"the server sends too slowly: no complete header within 0.3 s, after {done} bytes"
    with pytest.raises(DataError, match=slow):
        fetch(f"{home}/{path}", tmp_path / "file", sha256=SHA256, nbytes=len(CONTENT))
    assert_nothing_in(tmp_path)


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://127.0.0.1:x/", "http://", "http://a b/", "http://xn--\u00e9.\u00e9/"],
)
def test_an_address_that_cannot_be(url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        fetch(url, tmp_path / "file", sha256=SHA256)
    assert "\n" not in str(caught.value)


def test_every_set_with_a_home_has_known_sizes() -> None:
    for known in NAMED.values():
        if known.home is not None:
            assert set(known.nbytes) == set(known.files) == set(known.sha256), known.name
            assert known.archive is None or known.archive.nbytes
