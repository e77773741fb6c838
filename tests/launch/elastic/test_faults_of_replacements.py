"""Faults in a real elastic run: each occurs once, random ones also in replacements."""

import json
import sys
from pathlib import Path

import pytest

from support.allstep_command import run

pytestmark = pytest.mark.usefixtures("processes")

# No step is made by a single worker, so that the successor of a victim has joined before the next
# fault. The rank of `random` must have one in worker 0 before that is killed, and in its successor.
SCRIPT = """
import json, os, time
import torch
import allstep.torch as hvd
from allstep import faults, wire

def wait_for_random_fault():
    end = time.monotonic() + 60
    while time.monotonic() < end and not has_random_fault():
        time.sleep(0.02)

def has_random_fault():
    return any(each.startswith("random") for each in faults.active.reports.occurred)

hvd.init()
number = int(os.environ["ALLSTEP_WORKER"])
if number == 0:
    wait_for_random_fault()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)

@hvd.elastic.run
def train(state):
    while state.step < 24:
        if hvd.size() < 2:
            time.sleep(0.02)
        else:
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            state.step += 1
        state.commit()

train(state)
if faults.active.rank == 0:
    wait_for_random_fault()
hvd.barrier()
address, token = wire.parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"]
client = wire.Client(address, token, ticket=os.environ["ALLSTEP_TICKET"])
of_workers = [key.split("/") for key in client.keys() if key.startswith("elastic/")]
named = {parts[2] for parts in of_workers if parts[1] in ("ask", "place", "progress")}
result = [number, faults.active.rank, has_random_fault(), sorted(map(int, named))]
print("result", json.dumps(result), flush=True)
hvd.barrier()
hvd.shutdown()
"""


def test_each_fault_occurs_once_and_the_store_keeps_no_keys_of_the_dead(tmp_path: Path) -> None:
    """The victim of the first fault is replaced, then that of the second one.

    Steps are counted in each process: a replacement that had one of the faults would be killed, or
    would be killed together with the worker that started as that rank.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    given = ["kill@rank=0,step=3", "kill@rank=1,step=6", "random:stop:0.01@every=1,rank=0"]
    options = [option for fault in given for option in ("--fault", fault)]
    done = run("run", "-np", "2", "--min-np", "1", *options, sys.executable, script, limit=150)
    assert done.code == 0, done.err
    killed = [line for line in done.err.splitlines() if "kills itself" in line]
    assert len(killed) == 2, done.err
    assert "fault kill@rank=0,step=3: rank 0 kills itself with SIGKILL at step 3" in killed[0]
    assert "fault kill@rank=1,step=6: rank 1 kills itself with SIGKILL at step 6" in killed[1]
    lines = [line.partition("result ")[2] for line in done.out.splitlines() if "result " in line]
    first, second = sorted(map(json.loads, lines), key=lambda result: result[1])
    assert [first[1], second[1]] == [0, 1] and first[2], "a random fault in the successor of 0"
    living = sorted([first[0], second[0]])
    assert living == [2, 3]
    assert first[3] == second[3] == living, done.out
    assert "did not occur" not in done.err
