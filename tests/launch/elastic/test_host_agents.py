"""Agents of other hosts that end while the launcher's loop runs; `sh` takes the place of ssh."""

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from allstep import wire
from allstep.launch.elastic.elastic_launcher import ElasticLauncher
from allstep.launch.elastic.host_poll import FoundHosts
from allstep.launch.host_connection import HostConnection
from allstep.launch.hosts.host_list import Host
from allstep.launch.job import Job
from allstep.launch.link import Link
from allstep.launch.messages import TO_LAUNCHER, Hello
from allstep.launch.roster.elastic_policy import Policy

pytestmark = pytest.mark.usefixtures("processes")
FAR = Host("far", 1)


@pytest.fixture
def connected() -> Iterator[Callable[[str], tuple[ElasticLauncher, HostConnection]]]:
    """Make a launcher that is connected to host far, where a shell command is the agent."""
    made: list[tuple[ElasticLauncher, HostConnection]] = []

    def make(script: str) -> tuple[ElasticLauncher, HostConnection]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
        os.set_blocking(process.stderr.fileno(), False)
        link = Link(process.stdout.fileno(), process.stdin.fileno(), TO_LAUNCHER)
        launcher = ElasticLauncher(Job(["true"], [FAR]), Policy(1, 1))
        launcher.store = wire.Server("token")
        connection = HostConnection(FAR, [], link, process=process)
        made.append((launcher, connection))
        launcher.watch([connection])
        launcher._listen_to(0, connection)
        return made[-1]

    yield make
    for launcher, connection in made:
        launcher.ended.set()
        launcher.beater.join()
        launcher.store.close()
        launcher.selector.close()
        connection.end()


def test_the_streams_of_a_released_agent_end_together(connected) -> None:
    """One event of the loop closes the connection; the next one is about its standard error."""
    launcher, connection = connected("read line; exec >&-; sleep 0.1")
    connection.hello = Hello(1, {}, None, None)
    launcher.agents.list_hosts(FoundHosts((), frozenset()))
    launcher.agents.release_unlisted(set())
    connection.process.wait(60)
    while not connection.has_ended:
        launcher._run_once()
    launcher._run_once()
    assert not launcher.run_state.is_over


def test_the_loop_does_not_wait_for_an_ssh_that_ends_slowly(connected) -> None:
    """Its exit code is part of the reason, so that is known only after it has ended."""
    launcher, connection = connected("exec >&-; read line; echo refused >&2; exit 255")
    while not connection.link.ended:
        launcher._run_once()
    assert launcher.run_state.problem is None
    connection.process.stdin.close()
    while launcher.run_state.problem is None:
        launcher._run_once()
    assert "ssh to far failed: refused" in launcher.run_state.problem


def test_a_closed_link_reads_nothing() -> None:
    """The loop may still have an event of a connection that is closed; its descriptor is reused."""
    read, write = os.pipe()
    link = Link(read, write, TO_LAUNCHER)
    link.close()
    os.write(write, b"for another reader")
    assert list(link.receive()) == []
    assert link.ended
    assert os.read(read, 100) == b"for another reader"
    os.close(read)
    os.close(write)
