"""Which processes the store of an elastic run admits: real runs."""

import sys
from pathlib import Path

import pytest

from support.allstep_command import processes_with, run
from support.ranks import wait_until

pytestmark = pytest.mark.usefixtures("processes")

# On the second host the worker is a process that outlives its agent, as behind a cut link.
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
cut_off = os.environ["ALLSTEP_HOST"] == "127.0.0.1"
if cut_off:
    if child := os.fork():
        os.waitpid(child, 0)
        sys.exit(1)
    os.setsid()
    log = os.open(folder / "cut off", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)

import torch, torch.distributed as dist
import allstep
from allstep import comm, wire
from allstep.errors import PeerLost

world = allstep.init()
if cut_off:
    (folder / "pid").write_text(str(os.getpid()))
    dist.all_reduce(torch.ones(1))
    os.kill(int(os.environ["ALLSTEP_AGENT"]), signal.SIGKILL)
    time.sleep(100)
    print("still here", file=sys.stderr)
dist.all_reduce(torch.ones(1))
try:
    dist.all_reduce(torch.ones(1))
except PeerLost:
    print("size", comm.rejoin().size)

address, token = wire.parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"]
own = os.environ["ALLSTEP_TICKET"]
for ticket in ("", "0-" + 32 * "a", "99-" + 32 * "a", "1-" + 32 * "a"):
    try:
        wire.Client(address, token, ticket=ticket).keys()
    except OSError as error:
        print(type(error).__name__, error)
client = wire.Client(address, token, ticket=own)
try:
    client.set("elastic/end/1", b"forged")
except ValueError as error:
    print(error)
print("secret in keys", own.partition("-")[2] in " ".join(client.keys()))
env = {**os.environ, "ALLSTEP_TICKET_PROCESS": ""}
second = [sys.executable, "-c", "import allstep; allstep.init(); print('joined')"]
done = subprocess.run(second, env=env, capture_output=True, text=True)
print("second", done.returncode, done.stdout, done.stderr)
"""


def test_only_workers_that_the_launcher_started_are_admitted(tmp_path: Path) -> None:
    """No ticket, unknown ones, a used one; and a worker without its agent exits by itself."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    hosts = ["-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1"]
    done = run("run", *hosts, sys.executable, script, str(tmp_path), env={"MARK": str(tmp_path)})
    assert done.code == 0, done.err
    assert [line.partition("] ")[2] for line in done.out.splitlines()] == [
        "size 1",
        "TicketRefused it has no ticket (ALLSTEP_TICKET); only workers that the launcher starts may"
        " join this run",
        "TicketRefused its ticket is unknown to this run",
        "TicketRefused its ticket is unknown to this run",
        "TicketRefused the ticket of worker 1 is not valid any more: the run has ended it, or"
        " continues without it",
        "the store refused set: worker 0 may not write 'elastic/end/1'",
        "secret in keys False",
        "second 1  allstep: this process is not admitted to the run and exits: the ticket of worker"
        " 0 is used by another process: a ticket admits one",
        "",
    ]
    wait_until(lambda: not processes_with(str(tmp_path)), 60, "the end of the worker")
    assert (tmp_path / "pid").exists()
    assert (tmp_path / "cut off").read_text().splitlines() == [
        "allstep: this worker was cut off from the run and exits: the ticket of worker 1 is not"
        " valid any more: the run has ended it, or continues without it"
    ]
