"""The discovery script: what it may print, and the thread that polls it during an elastic run."""

import re
import threading
import time
from pathlib import Path

import pytest

from allstep.errors import ConfigError
from allstep.launch.elastic.host_poll import FoundHosts, HostPoll
from allstep.launch.hosts.discovery import Discovery
from allstep.launch.hosts.host_list import Host
from support.allstep_command import processes_with

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.timeout(60)]


def printing(*lines: str) -> Discovery:
    return Discovery("printf '%s\\n' " + " ".join(f"'{line}'" for line in lines), 3)


def test_lists_of_hosts() -> None:
    assert Discovery("true").poll() == [], "hosts may come later"
    listed = printing("h1:2", "", "  h2 ", "me@[fe80::1]", "h1:2").poll()
    assert listed == [Host("h1", 2), Host("h2", 3), Host("me@fe80::1", 3)]


@pytest.mark.parametrize(
    ("discovery", "complaint"),
    [
        (printing("h1:2", "h2 slots=2"), "'h2 slots=2' is not HOST or HOST:NUMBER"),
        (printing("h1:2,h2:2"), "'h1:2,h2:2' is not HOST or HOST:NUMBER"),
        (printing("h1:-1"), "'h1:-1' is not HOST or HOST:NUMBER"),
        (printing("h1:2", "me@h1:3"), "printed h1 with 2 and with 3 slots"),
        (Discovery("no-such-script"), "exit code 127, standard error"),
        (Discovery("echo h1:1; exit 4"), "failed: exit code 4"),
    ],
)
def test_errors_show_what_was_printed(discovery: Discovery, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)) as raised:
        discovery.poll()
    assert str(raised.value).startswith(f"--host-discovery-script {discovery.script}")


def test_seconds_between_polls() -> None:
    assert Discovery.given("true", 1, {}).seconds == 1.0
    assert Discovery.given("true", 1, {"ALLSTEP_DISCOVERY_SECONDS": "0.5"}).seconds == 0.5
    with pytest.raises(ConfigError, match="ALLSTEP_DISCOVERY_SECONDS='0' is no timeout"):
        Discovery.given("true", 1, {"ALLSTEP_DISCOVERY_SECONDS": "0"})


def test_a_poll_reports_changes_and_each_failure_once(tmp_path: Path) -> None:
    """A script that hangs delays neither the reader nor the end, and is killed with its children."""
    file = tmp_path / "hosts"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(file)

    write("localhost\n")
    first = FoundHosts.of([Host("localhost", 1)])
    assert first.here == {"localhost"}
    polls = tmp_path / "polls"
    script = f"echo >> '{polls}'; if test -e '{file}.sh'; then . '{file}.sh'; fi; cat '{file}'"
    poll = HostPoll(Discovery(script, seconds=0.02), first)

    def wait_for_polls(number: int) -> None:
        before = len(polls.read_text()) if polls.exists() else 0
        while not polls.exists() or len(polls.read_text()) < before + number:
            time.sleep(0.01)

    try:
        write("localhost\n127.0.0.1:2\n")
        found = poll.take()
        assert isinstance(found, FoundHosts)
        assert found.hosts == (Host("localhost", 1), Host("127.0.0.1", 2))
        assert found.here == {"localhost", "127.0.0.1"}
        for _ in range(2):
            write("?\n")
            problem = poll.take()
            assert isinstance(problem, str) and "'?' is not usable" in problem, problem
            # Further failures, another order and the same list report nothing.
            wait_for_polls(3)
            write("127.0.0.1:2\nlocalhost\n")
            wait_for_polls(3)
        write("")
        assert poll.take() == FoundHosts((), frozenset())
        (tmp_path / "hosts.sh").write_text(f"sleep 987 & echo > '{tmp_path}/hangs'; wait\n")
        while not (tmp_path / "hangs").exists():
            time.sleep(0.01)
    finally:
        poll.close()
    assert processes_with(str(tmp_path)) == []
    assert not any(each.name == "allstep-hosts" for each in threading.enumerate())
