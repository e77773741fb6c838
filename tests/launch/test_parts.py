"""The parts of the launcher that need no processes: hosts, links, the choice of the first
failure."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.errors import ConfigError
from allstep.launch.agent import Agent, Worker
from allstep.launch.cause import (
    Failure,
    explained_by,
    final_report,
    first,
    last_error_lines,
    report,
)
from allstep.launch.hosts.host_list import Host, assign, is_here, parse_hosts, read_hostfile
from allstep.launch.hosts.ssh import command_on, describe_failure, forwarded, parse_env_only
from allstep.launch.link import Link
from allstep.launch.messages import TO_AGENT, TO_LAUNCHER, Lines, Problem, Start, WorkerOrder
from allstep.process.liveness import life_of
from allstep.process.python import module_flags

# Mostly what matters: ends of lines, redraws, and bytes that are not UTF-8.
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,3}(\.[a-z0-9-]{1,4})?", fullmatch=True)
HOSTS = st.lists(
    st.tuples(NAMES, st.integers(1, 9)), min_size=1, max_size=5, unique_by=lambda host: host[0]
)


@given(HOSTS, st.integers(1, 60))
def test_workers_fill_the_hosts_in_order(entries: list[tuple[str, int]], wanted: int) -> None:
    hosts = parse_hosts(",".join(f"{name}:{slots}" for name, slots in entries))
    assert hosts == [Host(name, slots) for name, slots in entries]
    if wanted > sum(slots for _, slots in entries):
        with pytest.raises(ConfigError, match=f"-np {wanted} asks for more workers"):
            assign(hosts, wanted)
        return
    used = assign(hosts, wanted)
    assert sum(host.slots for host in used) == wanted
    assert [host.name for host in used] == [host.name for host in hosts][: len(used)]
    assert all(given.slots == taken.slots for given, taken in zip(hosts, used[:-1], strict=False))


def test_a_hostfile_in_any_dialect(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# two hosts\nh1 slots=2 max_slots=4\n\nme@h2:3   # fast\nh3\n")
    assert read_hostfile(file) == [Host("h1", 2), Host("me@h2", 3), Host("h3", 1)]
    file.write_text("h1 slots=2\nh2 solts=2\n")
    with pytest.raises(ConfigError, match="line 2: 'solts=2'"):
        read_hostfile(file)
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="names no host"):
        read_hostfile(file)


def test_ipv6_addresses_are_in_brackets() -> None:
    assert parse_hosts("[fe80::1]:2,me@[::2]") == [Host("fe80::1", 2), Host("me@::2", 1)]
    with pytest.raises(ConfigError, match="brackets"):
        parse_hosts("fe80::1")


def test_which_host_is_here() -> None:
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert is_here(os.uname().nodename)
    assert not is_here("no-such-host.invalid")


@pytest.mark.parametrize(
    "printed", [b"Welcome to node7!\n{not json\n", b"Welcome to node7! ", b"\x00\xff\n{"]
)
def test_a_link_skips_what_a_login_shell_prints(printed: bytes) -> None:
    read, write = os.pipe()
    link = Link(read, write, TO_LAUNCHER)
    os.write(write, printed)
    link.send(Problem("\udcff"))
    assert list(link.receive()) == [Problem("\udcff")]
    os.close(write)
    assert list(link.receive()) == []
    assert link.ended
    os.close(read)


def test_a_link_takes_little_memory_for_noise() -> None:
    """A host that prints without end instead of a hello."""
    reading, writing = os.pipe()
    link = Link(reading, os.open(os.devnull, os.O_WRONLY), TO_LAUNCHER)
    for _ in range(100):
        # What a pipe holds.
        os.write(writing, b"x" * 65536)
        assert list(link.receive()) == []
        assert len(link._inbox) <= 1 << 20
    assert len(link._inbox) == 1 << 20 and not link.ended
    assert link.what_came().startswith("it printed 'xxxx") and len(link.what_came()) < 120
    for descriptor in (reading, writing, link.write_fd):
        os.close(descriptor)


def test_a_full_link_never_blocks() -> None:
    read, write = os.pipe()
    link = Link(read, write, TO_LAUNCHER)
    for number in range(1000):
        link.send(Lines(number, "out", ("x" * 1000,)))
    assert link.outbox
    found = []
    while len(found) < 1000:
        found += [message.rank for message in link.receive()]
        link.flush()
    assert found == list(range(1000))
    os.close(read)
    os.close(write)


def test_what_belongs_to_this_host_is_not_forwarded() -> None:
    env = {
        "PATH": "p",
        "BASH_FUNC_module%%": "() {",
        "HOME": "h",
        "SSH_AUTH_SOCK": "s",
        "OMP_NUM_THREADS": "3",
        "MY_KEY": "k",
    }
    assert forwarded(env) == {"PATH": "p", "OMP_NUM_THREADS": "3", "MY_KEY": "k"}


def test_env_only_keeps_what_workers_need() -> None:
    needed = {
        "PATH": "p",
        "PYTHONPATH": "m",
        "LD_LIBRARY_PATH": "l",
        "ALLSTEP_CALL_TOKEN": "t",
        "HOROVOD_CYCLE_TIME": "1",
    }
    env = {**needed, "HOME": "h", "API_KEY": "k", "WANTED": "w", "PATHS": "no path of ours"}
    assert forwarded(env, parse_env_only("WANTED", env)) == {**needed, "WANTED": "w"}
    assert forwarded(env, parse_env_only(" WANTED , API_KEY,", env)) == {
        **needed,
        "WANTED": "w",
        "API_KEY": "k",
    }
    assert forwarded(env, parse_env_only("", env)) == needed


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "WANTED,WANDB_API_KY",
            (
                "--env-only WANDB_API_KY: no such variable in the environment; did you mean"
                " 'WANDB_API_KEY'?"
            ),
        ),
        ("X=1", "--env-only X=1: no such variable in the environment; set it or leave it out"),
        ("HOME", "--env-only HOME: this variable belongs to each host and is never sent"),
        (
            "SSH_AUTH_SOCK",
            "--env-only SSH_AUTH_SOCK: this variable belongs to each host and is never sent",
        ),
    ],
)
def test_env_only_refuses_what_cannot_be_sent(text: str, error: str) -> None:
    env = {"WANTED": "w", "WANDB_API_KEY": "k", "HOME": "h", "SSH_AUTH_SOCK": "s"}
    with pytest.raises(ConfigError, match=re.escape(error)):
        parse_env_only(text, env)


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "ValueError: no",
]


def test_the_last_traceback_with_its_chain() -> None:
    noise = ["warning: a", *TRACEBACK, "continuing"]
    chained = [
        *TRACEBACK,
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *TRACEBACK,
    ]
    assert last_error_lines([*noise, *chained]) == chained
    assert last_error_lines([f"[rank1]: {line}" for line in TRACEBACK]) == TRACEBACK
    assert last_error_lines([f"line {number}" for number in range(20)]) == [
        f"line {number}" for number in range(10, 20)
    ]
    assert last_error_lines([]) == []


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4",
        "HorovodInternalError: Horovod has been shut down by rank 1",
    ],
)
def test_a_lost_connection_is_a_consequence(text: str) -> None:
    lost = ("Traceback (most recent call last):", text)
    failures = [
        Failure(0, "a", 1, 1.0, lost),
        Failure(2, "a", 1, 1.1, lost),
        Failure(1, "a", 3, 1.2),
    ]
    assert first(failures).rank == 1
    assert first(failures[:2]).rank == 0
    assert (
        "rank 1 on a failed first of 3: exit code 3, 1.2 s after the start; 2 others were stopped"
        in report(first(failures), 3, 2)
    )


EXPLAINED = (
    "a warning of another library",
    "allstep: the run diverged: the loss is nan",
    "  what to try:",
    "    optimizer.clip=1",
    "",
)


@pytest.mark.parametrize("code", [1, 2])
def test_what_a_worker_has_explained_is_not_repeated(code: int) -> None:
    rank_0, silent = Failure(0, "a", code, 1.2, EXPLAINED), Failure(1, "a", code, 1.1)
    for failures in ([silent, rank_0], [rank_0, silent], [rank_0]):
        assert explained_by(failures, failures) is rank_0
        assert explained_by(failures, [silent]) is None, "rank 0 is not shown (--show)"
        assert final_report(failures, failures, 2, 0).startswith(
            "allstep run: rank 0 on a failed first of 2: exit code"
        )
        assert "\n" not in final_report(failures, failures, 2, 0)


@pytest.mark.parametrize(
    "failures",
    [
        [Failure(1, "a", 1, 1.1)],
        [Failure(0, "a", 3, 1.1, EXPLAINED)],
        [Failure(0, "a", -6, 1.1, EXPLAINED)],
        [Failure(0, "a", 1, 1.1, (*EXPLAINED, "a line of the script"))],
        [Failure(0, "a", 1, 1.1, ("Traceback (most recent call last):", *EXPLAINED))],
        [Failure(0, "a", 2, 1.2, EXPLAINED), Failure(1, "a", 1, 1.1)],
        [
            Failure(0, "a", 1, 1.2, EXPLAINED),
            Failure(1, "a", 1, 1.1, ("Traceback (most recent call last):", "  x", "KeyError: 3")),
        ],
        [Failure(0, "a", 1, 1.1, EXPLAINED, lost="no sign of life for 9 s")],
    ],
)
def test_what_was_not_explained_is_reported(failures: list[Failure]) -> None:
    assert explained_by(failures, failures) is None


def test_how_a_rank_ended() -> None:
    assert Failure(0, "a", -9, 1.0).exit_code == 137
    assert "SIGKILL" in Failure(0, "a", -9, 1.0).how
    assert "out-of-memory" in Failure(0, "a", -9, 1.0, out_of_memory=True).how
    assert "out-of-memory" not in Failure(0, "a", 1, 1.0, out_of_memory=True).how
    assert Failure(0, "a", -64, 1.0).how.startswith("killed by signal 64")
    assert Failure(0, "a", 1, 1.0, lost="silent").exit_code == 1


@pytest.mark.parametrize(
    "name",
    [
        "-lroot",
        "-v",
        "a@-lroot",
        "a;b",
        "$(id)",
        "a`b`",
        "h|x",
        "h&",
        "a'b",
        "é",
        "a\x1bb",
        "a@b@c",
    ],
)
def test_a_host_name_is_neither_an_option_nor_a_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        parse_hosts(f"{name}:2")
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    with pytest.raises(ConfigError):
        read_hostfile(tmp_path / "hosts")


def test_host_names_that_are_usable() -> None:
    names = ["node-1", "me@node_1.cluster", "10.0.0.1", "[fe80::1%eth0]", "me@[::1]"]
    assert [host.name for host in parse_hosts(",".join(names))] == [
        "node-1",
        "me@node_1.cluster",
        "10.0.0.1",
        "fe80::1%eth0",
        "me@::1",
    ]


def test_a_bus_error_has_a_hint() -> None:
    found = Failure(0, "h", -7, 1.0)
    assert found.how.startswith(
        "killed by signal 7 (SIGBUS); a mapped file, such as a data file, was truncated"
    )


def test_ssh_takes_a_host_for_a_host() -> None:
    command = command_on("node-1", "ssh -p 22", "-V")
    assert command[command.index("node-1") - 1] == "--"
    assert "`ssh -o BatchMode=yes -- 'a b' true`" in describe_failure("a b", 255, "refused")
    assert describe_failure("h", 0, "", "it printed 'hi'").endswith(
        "before its hello: it printed 'hi'"
    )


@pytest.mark.parametrize(
    ("given", "text"), [("", "is empty"), ("ssh 'a", "No closing quotation"), (" \n", "is empty")]
)
def test_an_ssh_command_that_is_none(given: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--ssh .*{text}.*"):
        command_on("node-1", given, "-V")


@pytest.mark.usefixtures("processes")
def test_an_agent_starts_without_a_warning() -> None:
    """The launcher quotes the last line that the connection to a lost host printed."""
    command = [sys.executable, *module_flags("allstep.launch.agent_main"), "host"]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith('{"kind": "hello"')


LARGE = """
memory = bytearray(800 << 20)
memory[:: 4096] = bytes(len(memory) // 4096)
print(flush=True)
input()
"""


@pytest.mark.usefixtures("processes")
def test_a_large_worker_is_reported_before_its_memory_is_free() -> None:
    """With its exit code, and with what it has printed."""
    for _ in range(6):  # a machine that stands still just then gets another round
        ours, theirs = socket.socketpair()
        agent = Agent(Link(ours.fileno(), ours.fileno(), TO_AGENT), "here", remote=False)
        launcher = Link(theirs.fileno(), theirs.fileno(), TO_LAUNCHER)
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, "-c", LARGE], stdin=pipe, stdout=pipe)
        process.stdout.readline()
        life = life_of(process.pid)
        agent.workers[0] = Worker(0, process, life)
        agent.running.add(0)
        agent.selector.register(life, 1)
        agent._look()
        assert list(launcher.receive()) == []
        process.kill()
        while 0 in agent.running and not life.has_ended():
            agent._look()
        was_there = not life.has_ended()
        if 0 in agent.running:
            agent._exited(0)
        assert [(each.rank, each.code) for each in launcher.receive()] == [(0, -9)]
        process.communicate()
        if was_there:
            agent._exited(0)
            assert list(launcher.receive()) == [], "reported once"
        agent.selector.close()
        agent.port_holder.close()
        ours.close()
        theirs.close()
        if was_there:
            return
    pytest.fail("reported only when the memory had been freed")


@pytest.mark.usefixtures("processes")
def test_ended_workers_leave_no_descriptors() -> None:
    """In an elastic run an agent starts workers as long as the run lasts."""
    ours, theirs = socket.socketpair()
    agent = Agent(Link(ours.fileno(), ours.fileno(), TO_AGENT), "here", remote=False)
    order = Start(
        command=("sh", "-c", "echo out; echo err >&2"),
        cwd="/",
        env=dict(os.environ),
        workers=(),
        foreground=None,
        store=(),
        token="token",
        peers=(),
        iface=None,
        lost=10.0,
        beat=1.0,
        num_sharing=1,
        is_elastic=True,
    )
    counts = []
    for rank in range(4):
        agent._start(WorkerOrder(rank, {}), dict(os.environ), order)
        while rank in agent.running or not all(stream.ended for stream in agent.streams):
            for key, _ in agent.selector.select(10):
                key.data()
        counts.append(len(os.listdir("/proc/self/fd")))
    # `key` may still hold the two descriptors of the last worker's `Life`.
    assert max(counts) <= min(counts) + 2, counts
    agent.selector.close()
    agent.port_holder.close()
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("processes")
def test_a_worker_that_was_killed_first_is_reported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 has failed because of worker 1, whose memory the kernel has not freed yet."""
    ours, theirs = socket.socketpair()
    agent = Agent(Link(ours.fileno(), ours.fileno(), TO_AGENT), "here", remote=False)
    for rank in range(2):
        process = subprocess.Popen(["sh", "-c", f"exec sleep {600 * rank}"])
        agent.workers[rank] = Worker(rank, process, life_of(process.pid))
        agent.running.add(rank)
        agent.selector.register(agent.workers[rank].life, 1)
    ending = []
    monkeypatch.setattr(type(agent.workers[1].life), "is_ending", lambda life: life in ending)
    launcher = Link(theirs.fileno(), theirs.fileno(), TO_LAUNCHER)

    ending.append(agent.workers[1].life)
    agent._exited(0)
    assert list(launcher.receive()) == []
    agent.workers[1].process.kill()
    agent._exited(1)
    assert [(each.rank, each.code) for each in launcher.receive()] == [(1, -9), (0, 0)]
    agent.workers.clear()
    agent.selector.close()
    agent.port_holder.close()
    ours.close()
    theirs.close()
