"""`allstep run --min-np`: real workers that are killed, replaced, and that fail by themselves."""

import json
import sys
from pathlib import Path

import pytest

from support.allstep_command import run

pytestmark = pytest.mark.usefixtures("processes")

SCRIPT = '''
import json, os, signal, sys, time
import torch
import allstep.torch as hvd

folder, steps = sys.argv[1], int(sys.argv[2])
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 2).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=[])

def once(name):
    """Return whether no worker has asked for this name before."""
    try:
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

@hvd.elastic.run
def train(state):
    while state.step < steps:
        # The last step waits for the successor of the killed worker.
        if state.step == steps - 1 and hvd.size() < int(sys.argv[3]):
            time.sleep(0.05)
            state.commit()
            continue
        optimizer.zero_grad()
        model(torch.full((4, 3), 1.0 + state.step, dtype=torch.float64)).square().mean().backward()
        if state.step == 4 and hvd.rank() == 0 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        state.step += 1
        state.sizes = [*state.sizes, hvd.size()]
        state.commit()

train(state)
weights = [parameter.tolist() for parameter in model.parameters()]
print("result", json.dumps([hvd.rank(), state.sizes, weights]), flush=True)
hvd.barrier()
hvd.shutdown()
'''


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def results(out: str) -> list[list]:
    lines = [line.partition("result ")[2] for line in out.splitlines() if "result " in line]
    return sorted(json.loads(line) for line in lines)


def test_a_killed_worker_is_replaced_while_the_others_train(script: str, tmp_path: Path) -> None:
    command = [sys.executable, script, str(tmp_path), "20", "3"]
    done = run("run", "-np", "3", "--min-np", "2", *command, limit=150)
    assert done.code == 0, done.err
    (first, *others) = results(done.out)
    assert [each[0] for each in (first, *others)] == [0, 1, 2]
    assert all(each[1:] == first[1:] for each in others)
    sizes = first[1]
    assert len(sizes) == 20 and sizes[:4] == [3] * 4 and sizes[-1] == 3
    assert 2 in sizes
    second, third = done.err.splitlines()
    assert second.startswith(
        "allstep run: lost rank 0 on localhost: killed by signal 9 (SIGKILL); generation 1 has 2"
        " workers, 0 of them new: rank 0 is worker 1 on localhost"
    )
    assert "generation 2 has 3 workers, 1 of them new: " in third
    assert "rank 2 is worker 3 on localhost" in third


def test_below_the_minimum_the_others_wait_for_a_replacement(script: str, tmp_path: Path) -> None:
    command = [sys.executable, script, str(tmp_path), "8", "2"]
    done = run("run", "-np", "2", "--min-np", "2", *command, limit=150)
    assert done.code == 0, done.err
    first, second = results(done.out)
    assert first[1] == second[1] == [2] * 8
    assert first[2] == second[2]


def test_errors_of_the_program_end_the_run(tmp_path: Path) -> None:
    """All ranks raise the same: workers are not replaced, and the first traceback is the report."""
    file = tmp_path / "fails.py"
    file.write_text("import allstep.torch as hvd\nhvd.init()\nraise ValueError('no such column')\n")
    done = run("run", "-np", "2", "--min-np", "1", sys.executable, str(file), limit=150)
    assert done.code == 1
    assert done.err.splitlines()[-1].strip() == "ValueError: no such column"
    assert "failed" in done.err


def test_horovods_rule_ends_a_job_on_one_host(script: str, tmp_path: Path) -> None:
    command = [sys.executable, script, str(tmp_path), "8", "2"]
    done = run("run", "--as-horovodrun", "-np", "2", "--min-np", "1", *command, limit=150)
    assert done.code != 0
    assert "allstep run --min-np" in done.err
