"""An elastic run over real hosts: one is found, killed, cut off, reconnected and withdrawn.

On two hosts of two workers one worker is killed; of three hosts one is cut off and returns.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from conftest import SOAK
from support.allstep_command import processes_with, run, start
from support.elastic_script import ElasticScript
from support.hosts import Hosts
from support.ranks import wait_until

pytestmark = pytest.mark.timeout(300)
LOST_SECONDS = 2
STEPS = Path(__file__).parents[2] / "support" / "elastic_steps.py"


def agent_on(host: str, mark: str) -> int:
    """Return the agent of the worker on a host: its parent."""
    for pid in processes_with(mark):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"ALLSTEP_HOST={host}".encode() in variables:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError(f"no worker on {host}")


def test_a_host_is_found_killed_cut_off_and_withdrawn(two_hosts: Hosts, tmp_path: Path) -> None:
    """h1 has the launcher and trains from the first to the last epoch, with and without h2."""
    script = ElasticScript(tmp_path, ["h1:1"])
    sizes = [1, 2, 1, 2, 1, 2, 1]
    plan = {"epochs": 7, "size": dict(enumerate(sizes))}
    options = ["-np", "1", "--min-np", "1", "--ssh", two_hosts.ssh, "--as-horovod"]
    options += ["--host-discovery-script", script.discovery]
    env = {"ALLSTEP_LOST_SECONDS": str(LOST_SECONDS), "ALLSTEP_DISCOVERY_SECONDS": "0.2"}
    process = start("run", *options, *script.command(**plan), prefix=two_hosts.prefix(0), env=env)

    def wait_for_epoch(number: int) -> None:
        what = f"the end of epoch {number}"
        wait_until(lambda: len(script.log) > number or process.poll() is not None, 120, what)

    try:
        wait_for_epoch(0)
        script.list_hosts(["h1:1", "h2:1"])
        wait_for_epoch(1)
        os.kill(agent_on("h2", str(tmp_path)), signal.SIGKILL)
        wait_for_epoch(3)
        two_hosts.cut(1)
        began = time.monotonic()
        wait_for_epoch(4)
        # Noticed after LOST_SECONDS; the rest is room for a machine with other work.
        assert time.monotonic() - began < LOST_SECONDS + 20
        two_hosts.mend(1)
        wait_for_epoch(5)
        script.list_hosts(["h1:1"])
        out, err = process.communicate(timeout=120)
    finally:
        two_hosts.mend(1)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            print(out, err)
    assert process.returncode == 0, err
    expected = [(epoch, "h1", 0, size, epoch + 1) for epoch, size in enumerate(sizes)]
    assert script.log == expected, err
    generations = [line for line in err.splitlines() if "; generation " in line]
    assert "lost host h2: the connection to it ended" in generations[1]
    assert "lost host h2: no sign of life for" in generations[3]
    assert "0 workers join, 1 leave" in generations[5]
    wait_until(lambda: not processes_with(str(tmp_path)), 30, "the end of all processes")


@pytest.mark.parametrize("victim", [0, 2] if SOAK else [2])
@pytest.mark.soak(3)
def test_one_of_two_workers_of_a_host_is_killed(
    two_hosts: Hosts, tmp_path: Path, victim: int
) -> None:
    """Its host stays: the other worker there continues with those of the other host.

    Rank 0 and rank 2 are the first ranks of their hosts, which hold what its ranks share.
    """
    plan = json.dumps({str(victim): {"4": "kill"}})
    hosts = ["-np", "4", "--min-np", "1", "-H", "h1:2,h2:2", "--ssh", two_hosts.ssh]
    done = run("run", *hosts, sys.executable, STEPS, tmp_path, "12", plan)
    assert done.code == 0, done.err
    lines = [line.partition("result ")[2] for line in done.out.splitlines() if "result " in line]
    found = {number: rest for number, *rest in map(json.loads, lines)}
    for number in {0, 1, 2, 3} - {victim}:
        sizes, generations, gaps = found[number]
        # On a slow machine, the successor of the victim joins within the steps that are left.
        assert sizes[:4] == [4] * 4 and set(sizes[4:]) <= {3, 4} and len(sizes) == 12
        assert generations[:2] == [0, 1] and gaps
    host = "h1" if victim < 2 else "h2"
    assert f"lost rank {victim} on {host}: killed by signal 9 (SIGKILL)" in done.err
    assert "lost host" not in done.err
    wait_until(lambda: not processes_with(str(tmp_path)), 30, "the end of all processes")


@pytest.mark.soak(3)
def test_one_of_three_hosts_is_cut_off_and_reconnected(three_hosts: Hosts, tmp_path: Path) -> None:
    """The other two continue, and its new worker joins them when the link is back."""
    script = ElasticScript(tmp_path, ["h1:1", "h2:1", "h3:1"])
    sizes = [3, 2, 3]
    plan = {"epochs": 3, "size": dict(enumerate(sizes))}
    options = ["-np", "3", "--min-np", "2", "--ssh", three_hosts.ssh, "--as-horovod"]
    options += ["--host-discovery-script", script.discovery]
    env = {"ALLSTEP_LOST_SECONDS": str(LOST_SECONDS), "ALLSTEP_DISCOVERY_SECONDS": "0.2"}
    process = start(
        *("run", *options, *script.command(**plan)), prefix=three_hosts.prefix(0), env=env
    )

    def wait_for_epochs(number: int) -> None:
        what = f"the end of {number} epochs"
        wait_until(lambda: len(script.log) >= number or process.poll() is not None, 120, what)

    try:
        wait_for_epochs(1)
        three_hosts.cut(2)
        wait_for_epochs(2)
        three_hosts.mend(2)
        _, err = process.communicate(timeout=120)
    finally:
        three_hosts.mend(2)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            print(*process.communicate())
    assert process.returncode == 0, err
    expected = [(epoch, "h1", 0, size, epoch + 1) for epoch, size in enumerate(sizes)]
    assert script.log == expected, err
    assert "lost host h3: no sign of life for" in err
    assert "lost host h2" not in err
    wait_until(lambda: not processes_with(str(tmp_path)), 30, "the end of all processes")
