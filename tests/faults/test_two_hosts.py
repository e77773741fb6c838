"""Faults on two real hosts: the launcher's store and the agent are not on the victim's host."""

from pathlib import Path

import pytest

from support.allstep_command import run
from support.hosts import Hosts

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import time, allstep, torch, torch.distributed as dist
world = allstep.init()
for _ in range(200):
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("cut@rank=3,op=5", "lost rank 3 (injected fault: its connections were cut)"),
        ("kill-agent@rank=2,op=5", "host h2 is lost: "),
    ],
)
def test_faults_of_the_second_host(two_hosts: Hosts, tmp_path: Path, fault: str, text: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    hosts = ["-np", "4", "-H", "h1:2,h2:2", "--ssh", two_hosts.ssh]
    done = run("run", *hosts, "--env-only", "", "--fault", fault, script)
    assert done.code == 1, done.err
    assert text in done.err, done.err
    assert f"allstep: fault {fault}: rank {fault[fault.index('=') + 1]} " in done.err, done.err
    assert f"(injected fault: {fault})" in done.last_lines, done.err
