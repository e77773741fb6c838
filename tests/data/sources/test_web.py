"""Data at http(s) URLs, from real servers on this machine: correct, simple, broken and hostile."""

import contextlib
import gzip
import importlib
import io
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from allstep.cli import main
from allstep.data.opening import open_source
from allstep.data.sources import open_file as files
from allstep.data.sources import shards
from allstep.data.sources.open_file import open_file, stamp_of
from allstep.data.sources.shards import list_shards, read_classes
from allstep.data.sources.tar.source import TarSource, is_tar
from allstep.errors import DataError

pytest.importorskip("aiohttp")
web = importlib.import_module("allstep.data.sources.web")


def a_tar(samples: int = 3, labels: tuple[bytes, ...] = ()) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(samples):
            for name, content in (
                (f"{number}.jpg", b"image %d" % number),
                (f"{number}.cls", labels[number % len(labels)] if labels else b"%d" % number),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


TAR = a_tar()
LINKS = (
    *("a.tar", "b.tar#x", "/in/c%20d.tar", "sub/", "notes.txt", "/in/"),
    *("../out.tar", "file:///etc/x.tar", "http://other/o.tar", "http://[", "?C=N"),
)
LISTING = "".join(f'<a class="x" href="{link}">x</a>' for link in LINKS).encode()
BOMB = gzip.compress(bytes(10_000_000))


class Handler(BaseHTTPRequestHandler):
    """Each folder of the server is one of its manners."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        asked = (self.path, self.headers.get("Range"))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        manner, _, name = self.path.lstrip("/").partition("/")
        if name == "classes.txt":
            refused = manner in ("hidden", "hidden_numbers")
            self.send({"Content-Length": "0"}, b"", 403 if refused else 404)
        else:
            with contextlib.suppress(OSError):
                getattr(self, f"do_{manner}")(name)

    def do_in(self, name: str) -> None:
        if self.headers["Authorization"] and self.headers["Authorization"] != "Basic dTpw":
            self.send({"Content-Length": "0"}, b"", 401)
        elif name in ("", "index", "sub/"):
            assert self.headers["Accept-Encoding"] == "identity"
            self.send(
                {"Content-Length": str(len(LISTING)), "Content-Type": "text/html; charset=x"},
                LISTING,
            )
        elif name == "empty":
            self.send({"Content-Length": "0"}, b"")
        elif name == "none":
            self.send({"Content-Length": "0", "Content-Range": "bytes */0"}, b"", 416)
        else:
            self.send_range(TAR, len(TAR))

    def do_hidden(self, name: str) -> None:
        self.send_range(a_tar(labels=(b"dog", b"cat")), len(a_tar(labels=(b"dog", b"cat"))))

    def do_hidden_numbers(self, name: str) -> None:
        self.send_range(TAR, len(TAR))

    def do_wrong_size(self, name: str) -> None:
        self.send_range(TAR, 10 * len(TAR))

    def do_starred(self, name: str) -> None:
        self.send_range(TAR, "*")

    def do_first(self, name: str) -> None:
        """Any range begins at byte 0."""
        first, last = self.span(len(TAR))
        body = TAR[: last - first + 1]
        where = {
            "Content-Range": f"bytes 0-{len(body) - 1}/{len(TAR)}",
            "Content-Length": str(len(body)),
        }
        self.send(where, body, 206)

    def do_short(self, name: str) -> None:
        """Less than the range, with the header of the whole one."""
        first, last = self.span(len(TAR))
        body = TAR[first : last + 1][:7]
        where = {
            "Content-Range": f"bytes {first}-{last}/{len(TAR)}",
            "Content-Length": str(len(body)),
        }
        self.send(where, body, 206)

    def do_whole(self, name: str) -> None:
        self.send({"Content-Length": str(len(TAR))}, TAR)

    def do_silent(self, name: str) -> None:
        self.server.over.wait()  # type: ignore[attr-defined]

    def do_header(self, name: str) -> None:
        self.drip(b"HTTP/1.1 200 OK\r\nX-A: ")

    def do_drip(self, name: str) -> None:
        first, last = self.span(len(TAR))
        if first == last:
            return self.send_range(TAR, len(TAR))
        where = {
            "Content-Range": f"bytes {first}-{last}/{len(TAR)}",
            "Content-Length": str(last + 1 - first),
        }
        self.send(where, b"", 206)
        return self.drip(b"")

    def do_page(self, name: str) -> None:
        self.send({"Content-Type": "text/html"}, b"")
        self.drip(b"")

    def do_endless(self, name: str) -> None:
        self.send({"Content-Type": "text/html"}, b"")
        while not self.server.over.is_set():  # type: ignore[attr-defined]
            self.wfile.write(bytes(1 << 20))

    def do_bomb(self, name: str) -> None:
        self.send(
            {
                "Content-Encoding": "gzip",
                "Content-Length": str(len(BOMB)),
                "Content-Type": "text/html",
            },
            BOMB,
        )

    def do_garbage(self, name: str) -> None:
        self.wfile.write(b"\x00\xff\n" * 1000)

    def do_circle(self, name: str) -> None:
        self.send({"Location": self.path, "Content-Length": "0"}, b"", 302)

    def do_moved(self, name: str) -> None:
        self.send({"Location": f"/in/{name}", "Content-Length": "0"}, b"", 302)

    def do_local(self, name: str) -> None:
        self.send({"Location": "file:///etc/passwd", "Content-Length": "0"}, b"", 302)

    def span(self, size: int) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or f"bytes=0-{size - 1}")
        assert found
        return int(found[1]), int(found[2])

    def send_range(self, content: bytes, size: int | str) -> None:
        first, last = self.span(len(content))
        body = content[first : last + 1]
        if self.headers["Range"] is None:
            return self.send(
                {"Content-Length": str(len(content)), "Content-Type": "application/x-tar"}, content
            )
        where = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{size}", "ETag": '"x"'}
        return self.send({**where, "Content-Length": str(len(body))}, body, 206)

    def send(self, headers: dict[str, str], body: bytes, status: int = 200) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = "Content-Length" not in headers
        self.wfile.write(body)

    def drip(self, head: bytes) -> None:
        """A byte now and then."""
        self.wfile.write(head)
        while not self.server.over.wait(0.02):  # type: ignore[attr-defined]
            self.wfile.write(b"x")

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(handler: Any) -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        # Clients close their connections early: no traceback for that.
        server.handle_error = lambda *given: None  # type: ignore[method-assign]
        server.over, server.asked = threading.Event(), []  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield server
        server.over.set()  # type: ignore[attr-defined]
        server.shutdown()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_WAITS", (0.01, 0.01))
    with serving(Handler) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LIMIT", 0.3)


def test_a_shard_by_its_url_is_read_by_ranges_only(server: Any) -> None:
    url = f"{server.url}/in/a.tar"
    source = TarSource(url)
    assert [bytes(source.read(number).data) for number in range(len(source))] == [
        b"image %d" % n for n in range(3)
    ]
    assert (
        stamp_of(url) == {"size": len(TAR), "version": '"x"'}
        and bytes(open_file(url).read(0, len(TAR))) == TAR
    )
    assert {span is None for path, span in server.asked if path.endswith(".tar")} == {False}, (
        server.asked
    )
    assert bytes(open_file(f"{server.url}/moved/a.tar").read(5, 100)) == TAR[5:105]
    assert bytes(open_file(url.replace("//", "//u:p@")).read(5, 100)) == TAR[5:105]
    with pytest.raises(DataError, match=r"a.tar: the server answers 401 Unauthorized$"):
        open_file(url.replace("//", "//u:wrong@"))
    assert list_shards(f"{url}?signed=*", is_tar, "tars") == [f"{url}?signed=*"]
    for name in ("empty", "none"):
        assert open_file(f"{server.url}/in/{name}").size == 0


def test_a_refused_list_of_classes_is_an_error_where_it_numbers_labels(server: Any) -> None:
    """403 may mean that it is missing (S3) or that it may not be read: names need its order."""
    with pytest.raises(DataError, match=r"hidden/classes.txt: .*403.* labels that are texts"):
        TarSource(f"{server.url}/hidden/a.tar")
    assert len(TarSource(f"{server.url}/hidden_numbers/a.tar")) == 3
    lists = [path for path, _ in server.asked if path.endswith("classes.txt")]
    assert lists == ["/hidden/classes.txt", "/hidden_numbers/classes.txt"]


def test_a_listing_gives_what_is_inside_of_it(server: Any) -> None:
    inside = [f"{server.url}/in/{name}" for name in ("a.tar", "b.tar", "c%20d.tar")]
    for where in ("in/", "in/*.tar"):
        assert list_shards(f"{server.url}/{where}", is_tar, "tars") == inside
    assert list_shards(f"{server.url}/in/[ab].tar", is_tar, "tars") == inside[:2]
    assert list_shards(f"{server.url}/in/s*/a.tar", is_tar, "tars") == [
        f"{server.url}/in/sub/a.tar"
    ]
    own = server.url.replace("//", "//u:p@")
    assert list_shards(f"{own}/in/", is_tar, "tars")[0] == f"{own}/in/a.tar"
    assert list_shards(f"{server.url}/in/index", is_tar, "tars") == [
        f"{server.url}/in/index/{n}" for n in ("a.tar", "b.tar")
    ]
    server.asked.clear()
    assert list_shards(f"{server.url}/in/plain", is_tar, "tars") == [f"{server.url}/in/plain"]
    with pytest.raises(DataError, match=r"in/sub/x/: expected a listing in HTML"):
        list_shards(f"{server.url}/in/sub/x/", is_tar, "tars")
    assert len(open_source(f"{server.url}/in/")) == 9


@pytest.mark.parametrize(
    ("manner", "asked", "found"),
    [
        ("whole", "0-0", "status 200"),
        (
            "first",
            f"{len(TAR) - 1}-{len(TAR) - 1}",
            f"status 206 with Content-Range 'bytes 0-0/{len(TAR)}'",
        ),
        ("wrong_size", f"{10 * len(TAR) - 1}-{10 * len(TAR) - 1}", "status 206 with Content-Range"),
    ],
)
def test_a_server_without_ranges_is_named_at_opening(
    server: Any, manner: str, asked: str, found: str
) -> None:
    url = f"{server.url}/{manner}/a.tar"
    complaint = (
        f"{url}: the server does not answer range requests (requested bytes {asked}, found {found}"
    )
    for opened in (open_file, TarSource):
        with pytest.raises(
            DataError, match=re.escape(complaint) + r".*\); copy the file to this machine first"
        ):
            opened(url)


def test_a_range_that_is_too_short_is_not_taken(server: Any) -> None:
    file = open_file(f"{server.url}/short/a.tar")
    with pytest.raises(DataError, match="requested bytes 3-102, found 7 bytes"):
        file.read(3, 100)
    with pytest.raises(DataError, match="does not report its size"):
        open_file(f"{server.url}/starred/a.tar")


def test_pythons_own_server_is_refused_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tar").write_bytes(TAR)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *given: None)
    with serving(SimpleHTTPRequestHandler) as server:
        monkeypatch.setattr("sys.argv", ["allstep", "data", "verify", f"{server.url}/"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert (
        "a.tar: the server does not answer range requests (requested bytes 0-0, found status 200)"
        in printed
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("silent/a.tar", "the server sends no complete header within 0.3 s"),
        ("header/a.tar", "the server sends no complete header within 0.3 s"),
        ("drip/a.tar", r"the server sends too slowly: \d+ bytes in 0.3 s, expected 1000 a second"),
        ("silent/", "no complete header"),
        ("page/", "sends too slowly"),
        ("page/x", "sends too slowly"),
        ("page/*.tar", "sends too slowly"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_slow_servers_are_one_line_soon(server: Any, where: str, complaint: str) -> None:
    begun = time.monotonic()
    with pytest.raises(DataError, match=f"^{re.escape(server.url)}/.*{complaint}") as caught:
        TarSource(f"{server.url}/{where}")
    # Three tries of the limit, for a header or a body each; not the 300 s of aiohttp.
    assert time.monotonic() - begun < 10 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("endless/", "expected a listing of at most 4194304 bytes, found more"),
        ("bomb/", "expected a plain listing, found Content-Encoding 'gzip'"),
        ("bomb/a.tar", "does not answer range requests"),
        ("garbage/a.tar", "ClientResponseError: 400, message="),
        ("circle/a.tar", "the server redirects more than 10 times"),
        ("local/a.tar", "the server redirects to file:///etc/passwd; expected http"),
        ("local/", "the server redirects to file:///etc/passwd; expected http"),
    ],
)
def test_hostile_servers_are_one_line(server: Any, where: str, complaint: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(server.url)}/.*{complaint}") as caught:
        TarSource(f"{server.url}/{where}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.usefixtures("processes")
@pytest.mark.usefixtures("impatient")
def test_a_slow_range_is_not_asked_for_again_when_it_is_late(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(f"{server.url}/drip/a.tar")
    for timeout, tries in ((30, 3), (0, 1)):
        server.asked.clear()
        monkeypatch.setattr(files, "_RETRY_TIMEOUT", timeout)
        with pytest.raises(
            DataError, match="bytes 0 to 100 cannot be read: the server sends too slowly"
        ):
            file.read(0, 100)
        assert len(server.asked) == tries


@pytest.mark.parametrize("page", ["<a ", "<a href", "<a \t\n", "<a href=' "])
def test_a_hostile_listing_is_searched_in_no_time(
    monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setattr(web.Web, "_run", lambda *given: page + page[-1] * 100_000 + page * 30_000)
    begun = time.monotonic()
    assert web.web().ls("http://host/x/") == [] and time.monotonic() - begun < 5


def test_a_huge_list_of_classes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_MAX_CLASSES_NBYTES", 10)
    (tmp_path / "classes.txt").write_text("cat\ndog\ncow\n")
    with pytest.raises(DataError, match=r"classes.txt: expected at most 10 bytes, found 12"):
        read_classes(str(tmp_path / "x.tar"))


def test_addresses_that_cannot_be() -> None:
    for url in ("http://", "http:///x.tar", "http://127.0.0.1:9/x.tar", "http://127.0.0.1:x/y.tar"):
        with pytest.raises(DataError, match=re.escape(urlparse(url).scheme)) as caught:
            open_file(url)
        assert "\n" not in str(caught.value)
