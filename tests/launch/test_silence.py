"""Who gives up first when the way between launcher and agent is cut, and what the agent puts into a
worker's environment."""

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from allstep import machine, wire
from allstep.launch.agent import Agent
from allstep.launch.host_connection import HostConnection
from allstep.launch.hosts.host_list import Host
from allstep.launch.job import Job
from allstep.launch.launcher import Launcher
from allstep.launch.link import Link
from allstep.launch.messages import TO_AGENT, TO_LAUNCHER, Alive, Hello, Problem, Start, WorkerOrder
from allstep.launch.orders import Orders
from allstep.launch.run_events import Greeted
from allstep.limits import read_limits
from allstep.world import places

HELLO = Hello(port=1, interfaces={}, address=None, launcher_address="127.0.0.1")


@pytest.fixture
def link() -> Iterator[Link]:
    """What is sent comes back on the same link."""
    read, write = os.pipe()
    yield Link(read, write, TO_LAUNCHER)
    os.close(read)
    os.close(write)


@pytest.fixture
def store() -> Iterator[wire.Server]:
    with wire.Server("token") as server:
        yield server


def order_for_another_host(link: Link, store: wire.Server, env: dict[str, str]) -> Start:
    """What a launcher sends to the agent of a remote host.

    The working folder is missing there, so that no worker starts.
    """
    job = Job(["true"], [Host("far", 1)], env=env, cwd="/no/such/folder")
    ssh = subprocess.Popen.__new__(subprocess.Popen)
    connection = HostConnection(Host("far", 1), [0], link, process=ssh, hello=HELLO)
    return Orders(job, places(["far"]), [connection], "token", store.port, read_limits(env)).order(
        connection, ["127.0.0.1"], [WorkerOrder(0, {})]
    )


def test_silence_counts_from_the_hello_on(link: Link, store: wire.Server) -> None:
    """ssh may need longer to connect than a host may be silent later."""
    launcher = Launcher(Job(["true"], [Host("far", 1)]))
    launcher.token, launcher.store = "token", store
    ssh = subprocess.Popen.__new__(subprocess.Popen)
    connection = HostConnection(Host("far", 1), [0], link, process=ssh)
    launcher.watch([connection])
    launcher.began -= 10 * launcher.limits.lost
    # Not a pause of the launcher's own, which would be excused.
    launcher.state.decide(launcher._moment())
    launcher.state.note_alive(0, 0.0)
    launcher._run_once()
    assert not launcher.state.failures
    launcher.state.take(Greeted(launcher._moment(), 0))
    launcher._run_once()
    assert [
        failure.lost.startswith("no sign of life for ") for failure in launcher.state.failures
    ] == [True]


def test_the_agent_gives_up_before_the_launcher_does(
    link: Link, store: wire.Server, capfd: pytest.CaptureFixture[str]
) -> None:
    order = order_for_another_host(link, store, {"ALLSTEP_LOST_SECONDS": "20"})
    agent = Agent(Link(link.read_fd, link.write_fd, TO_AGENT), "far", remote=True)
    link.send(order)
    agent._receive()
    assert list(map(type, link.receive())) == [Problem], "there is no such folder"
    agent.last_received = time.monotonic() - 13
    agent._beat()
    assert not agent.link.ended
    assert capfd.readouterr().err == ""
    agent.last_received = time.monotonic() - 15
    agent._beat()
    assert agent.link.ended
    assert (
        capfd.readouterr().err
        == "no sign of life from the launcher for 15 s: the agent ended its workers\n"
    )
    agent.port_holder.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("printed", "why"),
    [
        ("", "the connection to it ended"),
        (
            "a\nclient_loop: send disconnect: Broken pipe\n",
            "the connection to it ended (client_loop: send disconnect: Broken pipe)",
        ),
    ],
)
def test_a_connection_that_ended_is_explained_by_what_ssh_printed(
    link: Link, printed: str, why: str
) -> None:
    with subprocess.Popen(
        ["sh", "-c", 'printf %s "$0" >&2', printed], stderr=subprocess.PIPE
    ) as ssh:
        ssh.wait(10)
        assert HostConnection(Host("far", 1), [0], link, process=ssh).why_it_ended() == why
    assert HostConnection(Host("here", 1), [0], link).why_it_ended() == "its agent was killed"


def test_an_agent_without_orders_gives_up_sooner_than_the_default(link: Link) -> None:
    agent = Agent(link, "far", remote=True)
    agent.last_received = time.monotonic() - 8
    agent._beat()
    assert link.ended
    agent.port_holder.close()


def test_a_pause_of_the_agent_is_silence_in_an_elastic_run(link: Link) -> None:
    """The launcher may have formed a world without this host meanwhile."""
    agent = Agent(link, "far", remote=True)
    for is_elastic, ends in [(False, False), (True, True)]:
        agent.is_elastic = is_elastic
        now = time.monotonic()
        agent.last_received = now - 8
        agent._excuse_pause(now, 7.5)
        agent._beat()
        assert agent.link.ended is ends
    agent.port_holder.close()


@pytest.mark.parametrize("lost", ["0.5", "3", "10", "60"])
def test_two_worlds_never_run_at_once(lost: str) -> None:
    """The cable is cut.

    Each side has last received a message up to a beat earlier, and looks at its clock once a beat.
    """
    limits = read_limits({"ALLSTEP_LOST_SECONDS": lost})
    agent_gives_up_at_the_latest = limits.lost_for_agent + limits.beat
    launcher_gives_up_at_the_earliest = limits.lost - limits.beat
    assert agent_gives_up_at_the_latest < launcher_gives_up_at_the_earliest


def beat_once(launcher: Launcher) -> None:
    turns = iter([False, True])
    launcher.ended.wait = lambda seconds: next(turns)
    launcher._beat()


def test_a_lost_host_gets_no_more_signs_of_life(link: Link) -> None:
    launcher = Launcher(Job(["true"], [Host("far", 1)], env={"ALLSTEP_LOST_SECONDS": "0.1"}))
    ssh = subprocess.Popen.__new__(subprocess.Popen)
    connection = HostConnection(Host("far", 1), [0], link, process=ssh, over=True)
    launcher.watch([connection])
    beat_once(launcher)
    assert list(link.receive()) == []
    connection.over = False
    beat_once(launcher)
    assert list(link.receive()) == [Alive()]


def test_the_agents_thread_count_is_not_taken_for_the_users() -> None:
    share = str(max(1, machine.allowed_cores() // 2))
    chosen = machine.thread_variables({}, 2)
    assert chosen["OMP_NUM_THREADS"] == share
    assert machine.threads_by_user(chosen) is None
    assert machine.threads_by_user({}) is None
    assert machine.threads_by_user({"OMP_NUM_THREADS": ""}) is None
    assert machine.threads_by_user({"OMP_NUM_THREADS": "3"}) == "3"
    assert machine.threads_by_user({**chosen, "OMP_NUM_THREADS": "77"}) == "77", (
        "the script changed it"
    )
    assert machine.thread_variables({"OMP_NUM_THREADS": "3"}, 2) == {}
    inherited = machine.thread_variables({}, 1)
    assert machine.thread_variables(inherited, 2) == chosen, (
        "a run started by the worker of another run"
    )
