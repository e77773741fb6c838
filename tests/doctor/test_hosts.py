"""`allstep doctor -H`: hosts that are fine, cut off, behind a firewall, or that refuse us, on real
networks with a real sshd."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from allstep.doctor import Finding, Severity, host_checks
from allstep.doctor.hosts import THIS_MACHINE, Visit, visit
from allstep.launch.hosts import ssh as launch_ssh
from allstep.launch.hosts.host_list import parse_hosts
from support.hosts import SshHosts

PYTHON = sys.executable
HERE = ".".join(map(str, sys.version_info[:3]))


def problems(there: Visit) -> list[str]:
    found: list[Finding] = host_checks.find_all(there, HERE)
    return [finding.what for finding in found if finding.severity is Severity.PROBLEM]


def pairs(there: Visit) -> dict[tuple[str, str], bool]:
    return {(c.source, c.target): c.error is None for c in there.connections}


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


def doctor(*arguments: str, prefix: list[str] | None = None) -> tuple[int, dict[str, Any]]:
    command = [*(prefix or []), PYTHON, "-m", "allstep", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_two_sound_hosts_from_this_machine(two_hosts: SshHosts) -> None:
    code, report = doctor("-H", "h1:1,h2:2", "--ssh", two_hosts.ssh)
    assert code == 0, report["findings"]
    assert [(host["error"], host["here"], host["address"]) for host in report["hosts"]] == [
        (None, False, address) for address in two_hosts.addresses
    ]
    for host in report["hosts"]:
        assert host["facts"]["cores"]["affinity"] == len(os.sched_getaffinity(0))
        assert abs(host["clock_offset"]) < 10 and 0 < host["seconds"] < 60
        assert host["resolves_to"] == []  # known to ssh only
    reached = {
        (c["source"], c["target"]): (c["error"], c["interface"]) for c in report["connections"]
    }
    expected = [("h1", "h2"), ("h1", THIS_MACHINE), ("h2", "h1"), ("h2", THIS_MACHINE)]
    assert reached == dict.fromkeys(expected, (None, "eth0"))
    assert report["use"]["workers"] == 3
    assert report["trial"]["ranks"] == 2 and report["trial"]["error"] is None
    assert any(
        "own name resolves to a loopback address" in finding["what"]
        for finding in report["findings"]
    )


def test_two_sound_hosts_from_one_of_them(two_hosts: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1 slots=1\nh2 slots=1\n")
    arguments = (
        "--quick",
        "--iface",
        "eth0",
        "--hostfile",
        str(tmp_path / "hosts"),
        "--ssh",
        two_hosts.ssh,
    )
    code, report = doctor(*arguments, prefix=two_hosts.prefix(0))
    assert code == 0, report["findings"]
    assert [host["here"] for host in report["hosts"]] == [True, False]
    assert (
        report["hosts"][0]["address"] == two_hosts.addresses[0]
    )  # not 127.0.1.1, as its name resolves
    assert {(c["source"], c["target"], c["error"]) for c in report["connections"]} == {
        ("h1", "h2", None),
        ("h2", "h1", None),
    }
    assert any("resolves to 127.0.1.1" in finding["what"] for finding in report["findings"])


def test_a_host_that_is_cut_off_is_named_and_the_other_is_still_looked_at(
    two_hosts: SshHosts,
) -> None:
    two_hosts.cut(1)
    try:
        with at_most(10):  # ssh takes an option's first value: ours comes before the doctor's 10 s
            there = visit(parse_hosts("h1,h2"), f"{two_hosts.ssh} -o ConnectTimeout=3")
    finally:
        two_hosts.mend(1)
    (what,) = problems(there)
    assert "ssh to h2 failed" in what
    assert pairs(there) == {("h1", THIS_MACHINE): True}


def test_a_firewall_between_two_hosts_is_named_by_the_pair(
    two_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets of h1 to h2 go to a network card that does not exist: lost in silence, as behind a
    firewall."""
    monkeypatch.setattr("allstep.doctor.hosts.CONNECT_SECONDS", 1.5)
    nowhere = ["lladdr", "02:00:00:00:00:99", "dev", "eth0"]
    two_hosts.exec(
        0,
        "ip",
        "neigh",
        "replace",
        two_hosts.addresses[1],
        *nowhere,
        "nud",
        "permanent",
        check=True,
    )
    try:
        with at_most(15):
            there = visit(parse_hosts("h1,h2"), two_hosts.ssh)
    finally:
        two_hosts.exec(0, "ip", "neigh", "del", two_hosts.addresses[1], "dev", "eth0", check=True)
    assert all(state.well for state in there.states)
    assert pairs(there) == {
        ("h1", "h2"): False,
        ("h1", THIS_MACHINE): True,
        ("h2", "h1"): False,
        ("h2", THIS_MACHINE): True,
    }
    first, second = problems(there)
    assert (
        "h1 cannot open a connection to h2" in first
        and two_hosts.addresses[1] in first
        and "timed out" in first
    )
    assert "h2 cannot open a connection to h1" in second


def test_a_wrong_key_is_refused_and_an_unknown_name_is_reported(
    two_hosts: SshHosts, tmp_path: Path
) -> None:
    key, config = tmp_path / "other_key", tmp_path / "ssh_config"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    config.write_text(
        two_hosts.ssh_config.read_text().replace(str(two_hosts.folder / "user_key"), str(key))
    )
    with at_most(20):
        there = visit(parse_hosts("h1,unknown.invalid"), f"ssh -F {config}")
    refused, unknown = problems(there)
    assert "ssh to h1 failed" in refused and "Permission denied" in refused
    assert "ssh to unknown.invalid failed" in unknown and "resolve" in unknown
    assert there.connections == []


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An ssh that runs the command here, as on a host with another version, another torch and a
    clock that is ahead."""
    # The command would hand on ours, and the host's own would have no effect.
    ours = os.environ.get("PYTHONPATH", "")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    theirs = os.pathsep.join(filter(None, [str(tmp_path), ours]))
    (tmp_path / "sitecustomize.py").write_text("""
import importlib.metadata, time, allstep._version
allstep._version.__version__ = "9.9"
true_time, true_version = time.time, importlib.metadata.version
time.time = lambda: true_time() + 100
importlib.metadata.version = lambda name: "1.0" if name == "torch" else true_version(name)
""")
    script = tmp_path / "fake-ssh"
    script.write_text(f"""#!/bin/sh
for argument; do command=$argument; done
echo "$@" > {tmp_path}/arguments
echo Welcome to this host
exec env PYTHONPATH={theirs} SSH_CONNECTION="127.0.0.1 1 127.0.0.1 2" sh -c "$command"
""")
    script.chmod(0o755)
    return str(script)


@pytest.mark.usefixtures("processes")
def test_a_host_that_differs_from_this_one(fake_ssh: str) -> None:
    there = visit(parse_hosts("far.invalid:99"), fake_ssh)
    found = host_checks.find_all(there, "3.10.0")
    assert problems(there) == [f"far.invalid has allstep 9.9, here is {host_checks.__version__}"]
    warnings = "\n".join(finding.what for finding in found if finding.severity is Severity.WARNING)
    for text in ("has torch 1.0", "has Python", "cores for 99 workers", "is 100 s ahead of ours"):
        assert text in warnings


@pytest.mark.usefixtures("processes")
def test_the_doctor_calls_ssh_as_the_launcher_does(fake_ssh: str, tmp_path: Path) -> None:
    visit(parse_hosts("user@far.invalid"), fake_ssh)
    doctors = (tmp_path / "arguments").read_text()
    with launch_ssh.start_agent("user@far.invalid", "far.invalid", fake_ssh) as agent:
        assert agent.stdout
        agent.stdout.readline()
        agent.kill()
    assert (
        doctors.replace("allstep.doctor.probe", "allstep.launch.agent_main")
        == (tmp_path / "arguments").read_text()
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "seconds", "complaint"),
    [
        ("exec sleep 60", 1.0, "no answer from far.invalid within 1 s"),
        ("echo no such file >&2; exit 127", 50.0, "the interpreter must be at the same place"),
        (
            "echo \"ModuleNotFoundError: No module named 'allstep'\" >&2; exit 1",
            50.0,
            "allstep must be installed there",
        ),
    ],
)
def test_hosts_on_which_no_probe_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seconds: float, complaint: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr("allstep.doctor.hosts.HELLO_SECONDS", seconds)
    with at_most(25):
        (what,) = problems(visit(parse_hosts("far.invalid"), str(tmp_path / "ssh")))
    assert complaint in what


def test_an_interface_that_the_hosts_do_not_have(two_hosts: SshHosts) -> None:
    there = visit(parse_hosts("h1,h2"), two_hosts.ssh, "eth9")
    assert problems(there) == [
        f"--iface eth9: {name} has no such interface with an address; it has lo, eth0"
        for name in ("h1", "h2")
    ]
    assert there.connections == []


def test_no_probe_is_left_behind(
    two_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", str(tmp_path)
    )  # handed on to the probes: by it we know them from those of other runs
    visit(parse_hosts("h1,h2,localhost"), two_hosts.ssh)
    end = time.monotonic() + 30
    while probes(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert probes(tmp_path) == []


def probes(mark: Path) -> list[int]:
    """Processes on this machine and its simulated hosts that have the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PYTHONPATH") == str(mark):
                found.append(process.pid)
    return found
