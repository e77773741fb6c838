"""The hosts and clusters that other tests run on are what they claim to be, and go away."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.hosts import SshHosts, reachable, why_not
from support.slurm import Slurm


def comes_true(condition: Callable[[], bool], within: float = 40) -> bool:
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def ssh(hosts: SshHosts, to: str, command: str, prefix: tuple[str, ...] = ()) -> str:
    line = [*prefix, *hosts.ssh.split(), "-o", "BatchMode=yes", to, command]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_ssh_reaches_both_hosts_from_here_and_from_each_other(two_hosts: SshHosts) -> None:
    assert [ssh(two_hosts, name, "hostname") for name in ("h1", "h2")] == ["h1", "h2"]
    assert ssh(two_hosts, "h2", "hostname", tuple(two_hosts.prefix(0))) == "h2"
    assert ssh(two_hosts, "h1", "hostname", tuple(two_hosts.prefix(1))) == "h1"


def test_a_host_has_its_own_network_and_the_trap_of_its_own_name(two_hosts: SshHosts) -> None:
    script = "hostname; ls /sys/class/net; getent hosts h1 h2; ip -br -4 address show eth0"
    found = two_hosts.exec(0, "sh", "-c", script).stdout.split()
    assert found[:3] == ["h1", "eth0", "lo"]
    assert found[3:7] == ["127.0.1.1", "h1", two_hosts.addresses[1], "h2"]
    assert f"{two_hosts.addresses[0]}/24" in found


def test_a_process_on_a_host_is_a_child_like_any_other(two_hosts: SshHosts, tmp_path: Path) -> None:
    command = [*two_hosts.prefix(1), "sh", "-c", "echo $$; exec sleep 600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout
    with process.stdout:
        assert process.stdout.readline().strip() == str(process.pid)
    process.terminate()
    assert process.wait(40) == -signal.SIGTERM
    here = subprocess.run(
        [*two_hosts.prefix(0), "pwd"], cwd=tmp_path, capture_output=True, text=True
    )
    assert here.stdout.strip() == str(tmp_path)


def test_a_cut_host_is_silent_until_it_is_mended(two_hosts: SshHosts) -> None:
    h1, h2 = two_hosts.addresses
    two_hosts.cut(1)
    try:
        assert reachable(h1, 22, within=30)
        assert not reachable(h2, 22, within=1)
        assert (
            two_hosts.exec(0, "timeout", "1", "bash", "-c", f": </dev/tcp/{h2}/22").returncode
            == 124
        )
    finally:
        two_hosts.mend(1)
    assert reachable(h2, 22, within=40)
    assert ssh(two_hosts, "h2", "hostname") == "h2"


def test_a_killed_ssh_client_ends_the_remote_standard_input(
    two_hosts: SshHosts, tmp_path: Path
) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    client = subprocess.Popen(
        [*two_hosts.ssh.split(), "h2", f"touch {started}; cat; touch {ended}"],
        stdin=subprocess.PIPE,
    )
    assert comes_true(started.exists)
    assert not ended.exists()
    client.kill()
    assert comes_true(ended.exists)
    client.wait(40)
    assert client.stdin
    client.stdin.close()


RUN_AND_WAIT = """
import os, subprocess, sys, time
from support.hosts import SshHosts
hosts = SshHosts(["h1", "h2"])
command = [*hosts.ssh.split(), "h2", "echo $$; exec sleep 600"]
ssh = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
there = subprocess.Popen([*hosts.prefix(0), "sleep", "600"])
print(hosts.folder, hosts._cable, ssh.stdout.readline().strip(), there.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("namespaces")
def test_nothing_is_left_of_a_test_run_that_was_killed() -> None:
    if reason := why_not("ssh", "sshd", "ssh-keygen"):
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN_AND_WAIT], stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout
        folder, cable, remote, local = run.stdout.readline().split()
        leftovers = [
            Path(folder),
            Path("/sys/class/net") / cable,
            Path("/proc") / remote,
            Path("/proc") / local,
        ]
        assert [path for path in leftovers if not path.exists()] == []
        run.kill()
    assert comes_true(lambda: not any(path.exists() for path in leftovers)), leftovers


def test_slurm_runs_a_step(slurm: Slurm) -> None:
    done = slurm.run(
        ["srun", "-n", "2", "sh", "-c", "echo $SLURM_PROCID of $SLURM_NTASKS on $(hostname)"],
        timeout=100,
    )
    assert sorted(done.stdout.splitlines()) == ["0 of 2 on node1", "1 of 2 on node1"], done.stderr
    assert slurm.run(["srun", "-n", "1", "sh", "-c", "exit 3"], timeout=100).returncode == 3


def test_slurm_runs_a_step_over_two_nodes_from_one_of_them(slurm_two_nodes: Slurm) -> None:
    command = [
        "srun",
        "-N",
        "2",
        "--ntasks-per-node",
        "1",
        "sh",
        "-c",
        "getent hosts node2; hostname",
    ]
    done = slurm_two_nodes.run(command, on=0, timeout=100)
    found = done.stdout.split()
    assert sorted(found) == sorted(
        [slurm_two_nodes.addresses[1], "node2"] * 2 + ["node1", "node2"]
    ), done.stderr
