"""What a test costs, as one of four marks, and proof that unit tests are cheap.

| mark | the test | fixture that gives the mark |
|---|---|---|
| `hosts` | makes network namespaces or clusters | `namespaces` (used by `two_hosts`, `slurm`, ...) |
| `peers` | runs another program or library as reference or partner | `peers` |
| `ranks` | starts processes or sleeps | `processes` (used by `ranks`) |
| `unit` | does none of that | |

The marks follow from the fixtures that a test uses, those of its fixtures included, so they cannot
be forgotten; a test that uses several has the first mark of the table. The fixtures do nothing. A
test asks for one with `@pytest.mark.usefixtures("processes")`, a module with `pytestmark`, a
fixture by an argument.

During set-up and call of a unit test, an audit hook records processes that start and peers that
are imported, and `time.sleep` is replaced by a function that records the call: Python has an audit
event for it only since 3.13.
Whatever was recorded fails the test. All threads count that were started during the test, and the
test's own; threads that were there before do not, since a library may have started them. Tear-down
is not watched: the fixtures of a whole module end after its last test, whatever its mark.
"""

import multiprocessing.util
import platform
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

MARKS = {
    "hosts": "makes network namespaces or clusters",
    "peers": "runs another program or library as reference or partner",
    "ranks": "starts processes or sleeps",
    "unit": "starts no process and does not sleep",
}
BY_FIXTURE = {"namespaces": "hosts", "peers": "peers", "processes": "ranks"}

STARTS = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.exec",
    "os.system",
}
PEERS = {
    "accelerate",
    "jax",
    "keras",
    "mxnet",
    "playwright",
    "pytorch_lightning",
    "pytorch_optimizer",
    "tensorflow",
    "webdataset",
}
"""Libraries that tests compare with: importing one takes seconds."""
SPAWN = "multiprocessing.spawn"
SLEEP = "time.sleep"


@dataclass
class Watch:
    """What happens during a unit test, with the threads that were there before it."""

    found: list[str] = field(default_factory=list)
    test: threading.Thread = field(default_factory=threading.current_thread)
    before: list[threading.Thread] = field(default_factory=threading.enumerate)

    def see(self, event: str, detail: object) -> None:
        here = threading.current_thread()
        if here is self.test or here not in self.before:
            self.found.append(f"{event} ({detail!s:.80})")


_watch: Watch | None = None
"""Of the unit test that runs now; a test session inside a test has the inner one."""


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is None:
        return
    if event in STARTS or (event == "import" and arguments[0] in PEERS):
        _watch.see(event, arguments[0] if arguments else "")


def _watched_sleep(seconds: float) -> None:
    # sleep(0) only lets other threads run.
    if seconds and _watch is not None:
        _watch.see(SLEEP, f"{seconds} s")
    _sleep(seconds)


def _watched_spawn(path: Any, *arguments: Any) -> int:
    if _watch is not None:
        _watch.see(SPAWN, path)
    return _spawn(path, *arguments)


_sleep, _spawn = time.sleep, multiprocessing.util.spawnv_passfds
sys.addaudithook(_on_event)


@contextmanager
def watching() -> Iterator[list[str]]:
    """Yield the list to which processes and sleeps are added while the context lasts."""
    global _watch
    outer, _watch = _watch, Watch()
    kept = time.sleep, multiprocessing.util.spawnv_passfds
    time.sleep, multiprocessing.util.spawnv_passfds = _watched_sleep, _watched_spawn
    try:
        yield _watch.found
    finally:
        _watch = outer
        time.sleep, multiprocessing.util.spawnv_passfds = kept


def mark_of(fixtures: set[str]) -> str:
    """Return the mark of a test that uses these fixtures."""
    marks = {BY_FIXTURE[name] for name in BY_FIXTURE.keys() & fixtures}
    return next((mark for mark in MARKS if mark in marks), "unit")


def complaint(found: list[str]) -> str:
    listed = ", ".join(f"{number}x {event}" for event, number in Counter(found).items())
    return (
        "a unit test starts no process, does not sleep and imports no peer, but this one did: "
        f"{listed}. "
        'Wait for an event instead, or add @pytest.mark.usefixtures("processes"), '
        'which gives it the mark `ranks` (for another program or library: "peers")'
    )


class Costs:
    """The plugin: marks tests, watches unit tests, and prints the time by mark at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.tests: dict[str, set[str]] = defaultdict(set)

    def pytest_configure(self, config: pytest.Config) -> None:
        # The first call starts `uname`; Python keeps the answer.
        platform.platform()
        for mark, what in MARKS.items():
            config.addinivalue_line("markers", f"{mark}: {what}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = mark_of(set(getattr(item, "fixturenames", ())))
            item.add_marker(mark)
            # Reports carry properties to the controller of pytest-xdist. Their keywords hold the
            # names of folders, too, one of which is `hosts`.
            item.user_properties.append(("cost", mark))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._watched(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._watched(item))

    def _watched(self, item: pytest.Item) -> Iterator[Any]:
        if item.get_closest_marker("unit") is None:
            return (yield)
        with watching() as found:
            result = yield
        if found:
            pytest.fail(complaint(found), pytrace=False)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mark = dict(report.user_properties).get("cost")
        if isinstance(mark, str):
            self.seconds[mark] += report.duration
            self.tests[mark].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        terminalreporter.section("time by mark")
        for mark in MARKS:
            number, seconds = len(self.tests[mark]), self.seconds[mark]
            terminalreporter.write_line(f"{mark:<6} {number:>6,} tests {seconds:>9,.1f} s")
