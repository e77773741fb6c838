"""The marks of tests follow from their fixtures, and a unit test that is none fails.

The planted tests run in a session inside the test. The events of their processes are raised without
a process.
"""

import sys
import threading
import time
from itertools import pairwise

import pytest

from support.costs import MARKS, complaint, mark_of, watching

CONFTEST = """
import pytest
from support.costs import Costs

def pytest_configure(config):
    config.pluginmanager.register(Costs())

@pytest.fixture(scope="session")
def namespaces(): pass

@pytest.fixture(scope="session")
def peers(): pass

@pytest.fixture(scope="session")
def processes(): pass

@pytest.fixture
def server(processes): pass
"""
EVENTS = ["subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"]


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(source)
    with watching():  # what the planted tests do is not done by ours
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_a_unit_test_that_starts_a_process_fails(pytester: pytest.Pytester) -> None:
    source = f"""
    import pytest, sys
    @pytest.mark.parametrize("event", {EVENTS})
    def test_it(event): sys.audit(event, "program", [])
    """
    result = run(pytester, source)
    result.assert_outcomes(failed=len(EVENTS))
    expected = [f"*1x {event} (program)*usefixtures*processes*" for event in EVENTS]
    result.stdout.fnmatch_lines(expected)


def test_a_unit_test_that_sleeps_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, "import time\ndef test_it(): time.sleep(0.001)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*1x time.sleep (0.001 s)*"])


def test_a_unit_test_that_imports_a_peer_fails(pytester: pytest.Pytester) -> None:
    source = """
    import sys
    def test_it(): sys.audit("import", "webdataset", None, None, None, None)
    def test_other(): sys.audit("import", "some_module", None, None, None, None)
    """
    result = run(pytester, source)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*1x import (webdataset)*peers*"])


def test_spawned_workers_are_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """multiprocessing raises no audit event for them."""
    monkeypatch.setattr("support.costs._spawn", lambda *given: 1)
    source = """
    import multiprocessing.util
    def test_it(): multiprocessing.util.spawnv_passfds(b"program", [], [])
    """
    result = run(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*1x multiprocessing.spawn*"])


def test_its_own_fixtures_count(pytester: pytest.Pytester) -> None:
    source = """
    import pytest, sys
    @pytest.fixture
    def child(): sys.audit("os.fork")
    def test_it(child): pass
    """
    run(pytester, source).assert_outcomes(errors=1)


def test_with_a_fixture_it_may(pytester: pytest.Pytester) -> None:
    fixtures = ("processes", "server", "peers", "namespaces")
    source = "import sys, time\n" + "\n".join(
        f"def test_{name}({name}): sys.audit('os.fork'), time.sleep(0.001)" for name in fixtures
    )
    run(pytester, source).assert_outcomes(passed=len(fixtures))


def test_a_test_has_one_mark_and_the_time_is_summed_by_mark(pytester: pytest.Pytester) -> None:
    source = """
    import pytest
    def test_alone(tmp_path): pass
    @pytest.mark.usefixtures("server")
    def test_server(): pass
    @pytest.mark.usefixtures("peers", "processes")
    def test_peer(): pass
    @pytest.mark.usefixtures("peers", "namespaces")
    def test_host(): pass
    """
    result = run(pytester, source, "--strict-markers")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"{mark} *1 tests * s" for mark in MARKS])
    for mark, name in zip(MARKS, ("host", "peer", "server", "alone"), strict=True):
        result = run(pytester, source, "-m", mark, "-v")
        result.assert_outcomes(passed=1, deselected=3)
        result.stdout.fnmatch_lines([f"*::test_{name} PASSED*"])


def test_the_dearest_fixture_decides() -> None:
    assert [mark_of(names) for names in (set[str](), {"tmp_path"}, {"processes"})] == [
        "unit",
        "unit",
        "ranks",
    ]
    assert mark_of({"processes", "peers"}) == "peers"
    assert mark_of({"processes", "peers", "namespaces"}) == "hosts"


def test_threads_of_the_test_count_and_older_ones_do_not() -> None:
    """Older threads are those of libraries: what they do is not the test's."""
    begin, end = threading.Event(), threading.Event()

    def old() -> None:
        begin.wait()
        sys.audit("os.fork")
        end.set()

    before = threading.Thread(target=old)
    before.start()
    with watching() as found:
        begin.set()
        end.wait()
        assert found == []
        during = threading.Thread(target=sys.audit, args=("os.system", "program"))
        during.start()
        during.join()
    before.join()
    assert found == ["os.system (program)"]


def test_a_watch_ends_with_its_context() -> None:
    sleep = time.sleep
    with watching() as outer:
        with watching() as inner:
            sys.audit("os.fork")
            time.sleep(0)
        assert (inner, outer) == (["os.fork ()"], [])
    assert time.sleep is sleep


def test_the_complaint_counts_and_gives_the_remedy() -> None:
    text = complaint(["os.fork ()", "time.sleep (1 s)", "os.fork ()"])
    parts = ("2x os.fork ()", "1x time.sleep (1 s)", 'usefixtures("processes")', "`ranks`")
    places = [text.index(part) for part in parts]
    assert all(one < other for one, other in pairwise(places))
