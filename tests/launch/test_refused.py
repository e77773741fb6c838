"""What `allstep run` refuses before it starts anything: one line with exit status 2."""

import os
import pwd
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from allstep import cli
from allstep.errors import ConfigError
from allstep.launch import Host, Job, discover, parse_hosts, read_hostfile
from allstep.launch.hosts import discovery
from allstep.launch.hosts.parse import is_here
from support.allstep_command import run
from support.ranks import clean_environment


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Call `allstep run` in this process; the one line that it prints."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["allstep", "run", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1), err
        assert len(err) < 400, "the line quotes all of an absurd argument"
        return err

    return call


LONG = "a" * 5000
ABSURD = ["99999999999999999999", "1000000", "4097"]


@pytest.mark.timeout(60)
def test_absurd_arguments_are_one_line(refused, tmp_path: Path) -> None:
    labels = "expected at most 253 characters, and 1 to 63 between two dots"
    for name in (
        ".",
        "..",
        "a..b",
        ".a",
        LONG,
        f"a.{'b' * 64}",
        ".".join(["abcd"] * 60),
        f"me@{LONG}",
    ):
        assert labels in refused("-H", name, "true"), name
    for name in ("[...]", "[::g]", "[1:2]", "[::1%]"):
        assert "is not an IPv6 address" in refused("-H", name, "true"), name
    for number in ABSURD:
        assert "on localhost; expected at most 4,096 per host" in refused("-np", number, "true")
    for number in [*ABSURD, "9" * 5000]:
        assert "slots; expected at most 4,096 on a host" in refused(
            "-H", f"localhost:{number}", "true"
        )
    many = ",".join(f"h{number}:4096" for number in range(257))
    assert "1,052,672 workers in all; expected at most 1,048,576" in refused("-H", many, "true")
    for grace in ("nan", "inf", "-inf", "-1", "1e300", "86401"):
        assert "expected seconds from 0 to 86,400 (a day)" in refused(
            "-np", "1", "--grace", grace, "true"
        )
    for command in ("", " "):
        assert "the command is empty" in refused("-np", "1", command)
    for option in ("--log-dir", "--output-filename"):
        assert f"{option}: the name is empty" in refused("-np", "1", option, "", "true")
        for name in ("/dev/null", "/dev/null/x/y"):
            assert f"{option}: /dev/null is not a folder" in refused(
                "-np", "1", option, name, "true"
            )


def test_the_largest_that_is_accepted() -> None:
    labels = ".".join(["b" * 63] * 3 + ["c" * 61])
    for name in (labels, "h1.cluster.", "node_1", "x"):
        assert parse_hosts(f"{name}:4096") == [Host(name, 4096)]
    assert parse_hosts("h:0000000004") == [Host("h", 4)]
    for grace in (0.0, 86_400.0):
        assert Job(["true"], [Host("h", 4096)], grace=grace).grace == grace


@pytest.mark.timeout(60)
def test_odd_hostfiles(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfh1 slots=2\r\nh2 max-slots=3 slots=1\r\n")
    assert read_hostfile(file) == [Host("h1", 2), Host("h2", 1)]
    for text, complaint in (
        (b"h1\nh2 # caf\xe9\n", "hosts line 2: byte 9 is 0xe9, which is not UTF-8"),
        (b"\xff\xfeh\x001\x00\n", "hosts line 1: byte 1 is 0xff"),
        (b"h1\nh2 max_slots=\x1b[31m\n", r"hosts line 2: 'max_slots=\x1b[31m' is not understood"),
        (b"h1 max_slots=\n", "line 1: 'max_slots=' is not understood"),
        (b"h1 max-slots\n", "line 1: 'max-slots' is not understood"),
        (b"h1 slots=-1\n", "line 1: 'slots=-1' is not understood"),
        ("h1 slots=²\n".encode(), "line 1: 'slots=²' is not understood"),
        (b"h1 slots=2 rubbish\n", "line 1: 'rubbish' is not understood"),
        (
            b"h1 slots=99999999999999999999\n",
            "line 1: 99999999999999999999 slots; expected at most 4,096",
        ),
        (b"h1 slots=" + b"9" * 5000, "line 1: 999999999"),
        (b"h1\n" + b"x" * 5000, "line 2: the host name 'xxxxxxxxx"),
        (b"h1\n\n\x0b\nh..2\n", "line 4: the host name 'h..2' is not usable"),
        (b"#" * ((1 << 20) + 1), "is larger than 1,048,576 bytes"),
    ):
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
            read_hostfile(file)
        assert len(str(refused.value)) < 300 + len(str(file))
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/zero"), tmp_path / "pipe", tmp_path):
        with pytest.raises(
            ConfigError, match=f"{path}: is not a regular file; write the hosts to a file, or give"
        ):
            read_hostfile(path)


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(60)
def test_a_discovery_script_may_leave_a_process_behind(tmp_path: Path) -> None:
    """For example an ssh-agent, which holds the standard output of the script open."""
    began = time.monotonic()
    hosts = discover(f"sleep 40 & echo $! > {tmp_path}/pid; echo localhost:2; echo more >&2", 1)
    assert hosts == [Host("localhost", 2)] and time.monotonic() - began < 20
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("processes")
def test_a_discovery_script_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert discover("echo h1; echo h2:3", 2) == [Host("h1", 2), Host("h2", 3)]
    for script, complaint in (
        ("cat /dev/zero", "printed more than 1,048,576 bytes"),
        (r"printf 'h\351\n'", "printed bytes that are not UTF-8"),
        ("echo a..b", "--host-discovery-script echo a..b: the host name 'a..b' is not usable"),
        ("head -c 3000000 /dev/zero >&2; exit 3", "exit code 3, standard error"),
    ):
        with pytest.raises(ConfigError, match=re.escape(complaint)):
            discover(script, 1)
    monkeypatch.setattr(discovery, "_SECONDS", 0.3)
    began = time.monotonic()
    # The sleep is a child of the shell and keeps the pipes open.
    for script in ("sleep 1000; true", "exec >&- 2>&-; sleep 1000"):
        with pytest.raises(ConfigError, match="did not end within"):
            discover(script, 1)
    assert time.monotonic() - began < 50


def test_a_name_with_another_user_is_reached_by_ssh() -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    for label in ("localhost", "127.0.0.1", os.uname().nodename):
        assert is_here(label)
        assert is_here(f"{me}@{label}")
        assert not is_here(f"another-{me}@{label}")


def test_the_user_of_this_process_is_not_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(
            name, "nobody" if os.geteuid() != pwd.getpwnam("nobody").pw_uid else "root"
        )
    assert not is_here(f"{os.environ['USER']}@localhost")


@pytest.mark.usefixtures("processes")
def test_a_run_as_another_user_calls_ssh(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nexit 255\n')
    ssh.chmod(0o755)
    done = run("run", "-H", "another-user@localhost:1", "--ssh", ssh, "id")
    assert (done.code, done.out) == (2, "")
    assert " -- another-user@localhost exec " in (tmp_path / "called").read_text()


@pytest.mark.usefixtures("processes")
def test_an_interface_is_checked_on_a_single_host() -> None:
    done = run("run", "-np", "1", "--iface", "nope", "true")
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "--iface nope: localhost has no such interface with an address; it has lo" in done.err
    assert run("run", "-np", "1", "--iface", "lo", "true").code == 0
