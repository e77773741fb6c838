"""Downloads, against a real server on this machine: whole and right, or nothing."""

import gzip
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from allstep.data.sets.fetch import fetch, locked
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
        else:
            self.answer(CONTENT)

    def answer(self, content: bytes, length: int | None = len(CONTENT)) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def home() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked_to_end = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.asked_to_end.set()  # type: ignore[attr-defined]
        server.shutdown()


def assert_nothing_in(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def test_a_good_download(home: str, tmp_path: Path) -> None:
    target, told = tmp_path / "new" / "file", []
    fetch(f"{home}/file", target, sha256=SHA256, progress=lambda *figures: told.append(figures))
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["file"]
    (tmp_path / "usual").touch()
    assert target.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert told[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


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
    with pytest.raises(DataError, match=f"wrong content: expected SHA-256 {'0' * 64}, found {SHA256}"):
        fetch(f"{home}/file", tmp_path / "file", sha256="0" * 64)
    with pytest.raises(DataError, match="not a whole gzip file"):
        fetch(f"{home}/file", tmp_path / "file", sha256=SHA256, unpack=True)
    assert (tmp_path / "file").read_text() == "the old one"


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Connection refused"):
        fetch("http://127.0.0.1:9/file", tmp_path / "file", sha256=SHA256)
    with pytest.raises(DataError, match="cannot be downloaded"):
        fetch("http://nowhere.invalid/file", tmp_path / "file", sha256=SHA256)
    assert_nothing_in(tmp_path)


def test_a_folder_that_cannot_be_written(home: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"), locked(tmp_path / "file" / "folder"):
        pass


def test_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(DataError, match="another process"), locked(tmp_path, timeout=0.05):
        pass
    with locked(tmp_path):
        pass
