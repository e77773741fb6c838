"""`allstep run` with limits of any length, and with a store whose thread ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.allstep_command import processes_with, run
from support.ranks import clean_environment

pytestmark = pytest.mark.usefixtures("processes")

SUM = """
import allstep, torch, torch.distributed as dist
world = allstep.init()
t = torch.ones(1)
dist.all_reduce(t)
print(t.item(), flush=True)
allstep.shutdown()
"""
NAMES = [
    "ALLSTEP_START_TIMEOUT",
    "ALLSTEP_LOST_SECONDS",
    "ALLSTEP_STALL_SECONDS",
    "ALLSTEP_TIMEOUT",
]


@pytest.mark.parametrize("seconds", ["10000000", "31536000"])
def test_limits_of_months(tmp_path: Path, seconds: str) -> None:
    """epoll counts milliseconds up to 24.8 days."""
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    done = run("run", "-np", "2", script, env=dict.fromkeys(NAMES, seconds))
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["[0] 2.0", "[1] 2.0"]


@pytest.mark.parametrize("value", ["inf", "nan", "1e9", "0"])
def test_limits_out_of_range(value: str) -> None:
    done = run("run", "-np", "1", "true", env={"ALLSTEP_START_TIMEOUT": value})
    assert done.code == 2
    assert done.err.splitlines() == [
        f"allstep: ALLSTEP_START_TIMEOUT='{value}' is no timeout: "
        "expected seconds above 0 and at most 31536000 (a year)"
    ]


# The store's thread ends as soon as a worker has set a key.
BREAKING = """
import sys
from allstep.cli import main
from allstep.wire import Server

turn = Server._run_once

def broken(self):
    turn(self)
    if self.peek("break") is not None:
        raise RuntimeError("broken on purpose")

Server._run_once = broken
sys.argv = ["allstep", "run", "-np", "2", sys.executable, "-c", sys.argv[1]]
main()
"""
WORKER = """
import os, time
from allstep import wire
store = wire.Client(wire.parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"])
if os.environ["RANK"] == "0":
    # Rank 1 must have connected before: a store that is gone is an error of its own there.
    store.wait(["here"], 60.0)
    store.set("break", b"")
else:
    store.set("here", b"")
# A worker that computes, and does not notice.
time.sleep(600)
"""


def test_a_store_that_ends_by_itself_ends_the_run_with_a_report() -> None:
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    env = {**clean_environment(), "RUN_MARK": mark}
    command = [sys.executable, "-c", BREAKING, WORKER]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(
        "allstep run: the launcher's store ended by itself (RuntimeError: broken on purpose), "
    ), done.stderr
    assert "; 2 of 2 workers were killed." in line
    assert not processes_with(f"RUN_MARK={mark}")
