"""Servers between real hosts: network namespaces, `allstep run`, and a host that is cut off."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from allstep import wire
from allstep.world import places
from support.allstep_command import Done, run
from support.hosts import SshHosts
from support.ranks import clean_environment

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
    import json, os, sys, time, torch
    import allstep.kvstore

    found = []
    for name in ("dist_sync", "dist_async"):
        kv = allstep.kvstore.create(name)
        kv.init("w", torch.zeros(600_000))
        kv.set_optimizer(torch.optim.SGD, lr=1.0)
        out = torch.zeros(600_000)
        for _ in range(5):
            kv.pushpull("w", torch.ones(600_000), out=out)
        kv.barrier()
        kv.pull("w", out=out)
        found.append(out.unique().tolist())
        if name == "dist_async" and kv.rank == 0:
            print(json.dumps(found), flush=True)
            sys.exit()
        kv.barrier()
        if name == "dist_sync":
            kv.close()
    # Rank 0 has ended, and with it the worker of a server; the others still need that server.
    time.sleep(1.0)
    for _ in range(5):
        kv.pushpull("w", torch.ones(600_000), out=out)
    print(json.dumps(found), flush=True)
"""
CUT = """
    import json, os, time, torch
    import allstep.kvstore
    from allstep.errors import CommError

    kv = allstep.kvstore.create("dist_async")
    kv.init("w", torch.zeros(300_000))
    kv.set_optimizer(torch.optim.SGD, lr=0.0)
    kv.barrier()
    print("running", flush=True)
    began, pushes, last, gap = time.time(), 0, time.time(), 0.0
    try:
        while time.time() < began + 7 + 60 * kv.rank:
            kv.pushpull("w", torch.ones(300_000))
            pushes, gap, last = pushes + 1, max(gap, time.time() - last), time.time()
        print(json.dumps(["done", pushes, gap, ""]), flush=True)
    except CommError as error:
        print(json.dumps([type(error).__name__, pushes, time.time() - last, str(error)]))
    os._exit(0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def results(done: Done) -> list[object]:
    assert done.code == 0, done.err + done.out
    return [json.loads(line.partition("] ")[2]) for line in done.out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-H", "h1:1,h2:1"], "2 workers on 2 hosts: h1 has rank 0, h2 has rank 1\n"),
        pytest.param(
            ["-H", "h1:1,h2:1", "--servers", "2"],
            "h2 has rank 1; 2 servers on h1, h2\n",
            marks=pytest.mark.soak,
        ),
        (
            ["-H", "h1:2", "--servers", "1", "--server-hosts", "h2"],
            "2 workers on 1 hosts: h1 has ranks 0-1; 1 server on h2\n",
        ),
    ],
    ids=["of workers", "of the launcher", "on a host of its own"],
)
def test_training_with_servers(
    two_hosts: SshHosts, script: Path, arguments: list[str], words: str
) -> None:
    done = run("run", *arguments, "--ssh", two_hosts.ssh, "python", script)
    assert results(done) == [[[-10.0], [-10.0]]] * 2
    assert words in done.err


def test_a_host_that_is_cut_off_in_async(two_hosts: SshHosts, tmp_path: Path) -> None:
    """The worker next to the server continues without a pause; the other one gets PeerLost."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(CUT))
    with wire.Server(token := wire.new_token(), two_hosts.gateway) as store:
        env = {
            **clean_environment(),
            "ALLSTEP_STORE": f"{two_hosts.gateway}:{store.port}",
            "ALLSTEP_TOKEN": token,
            "ALLSTEP_LOST_SECONDS": "4",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        server = subprocess.Popen(
            [*two_hosts.prefix(0), sys.executable, "-m", "allstep.kvstore.serving.process"],
            env={**env, "ALLSTEP_SERVER": "0"},
        )
        workers = [
            subprocess.Popen(
                [*two_hosts.prefix(world.rank), sys.executable, str(path)],
                env={**env, **world.to_env(), "ALLSTEP_SERVERS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for world in places(["h1", "h2"])
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "running\n"
            time.sleep(0.5)
            two_hosts.cut(1)
            outputs = [worker.communicate(timeout=100)[0] for worker in workers]
        finally:
            two_hosts.mend(1)
            for process in (server, *workers):
                process.kill()
                process.wait(10)
    here, there = map(json.loads, outputs)
    assert here[0] == "done" and here[1] > 20 and here[2] < 3, here
    assert there[0] == "PeerLost" and there[2] < 30, there
    assert "lost server 0 on h1 (no sign of life" in there[3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--servers", "0"], "--servers: expected a number from 1 to 1024, found 0"),
        (["--server-hosts", "h2"], "--server-hosts h2: the number of servers is missing; give it"),
        (
            ["--servers", "2", "--server-hosts", "h1:2"],
            "--server-hosts h1:2: expected names of hosts only, such as s1,s2",
        ),
        (
            ["--servers", "1", "--server-hosts", "h1,h2"],
            "--servers 1 on 2 hosts (h1,h2): some would run none; name as many hosts as servers",
        ),
        (["--servers", "1", "--min-np", "1"], "--servers 1 in an elastic run: its workers start"),
        (["--servers", "1", "--server-hosts", "no-such-host", "--ssh", "false"], "no-such-host"),
    ],
)
@pytest.mark.usefixtures("processes")
def test_mistakes(arguments: list[str], words: str) -> None:
    done = run("run", "-np", "1", *arguments, "true")
    assert done.code == 2 and words in done.err and done.err.count("\n") == 1, done.err
