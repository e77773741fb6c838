"""A Horovod script whose hosts change while it trains, for `horovodrun` and `allstep run`.

It obeys a plan, a JSON object. Keys of its tables are epochs, of two steps each:

| entry | meaning |
|---|---|
| `epochs` | how many there are |
| `fail` | start ranks that fail at the start of the epoch, and how: "raise" or "kill" |
| `hosts` | lists of hosts that rank 0 writes for the discovery script after the epoch: one at once, the others 1.5 s apart; then it waits for the notification |
| `size` | train on, with commits only, until the world has this size |

Rank 0 logs each epoch: epoch, HOROVOD_HOSTNAME, its first rank, size, number of worlds so far.
"""

import json
from pathlib import Path
from typing import Any

SCRIPT = '''
import json, os, signal, sys, threading, time
import torch
import horovod.torch as hvd

folder, plan = sys.argv[1], json.loads(sys.argv[2])
hvd.init()
hostname, start_rank = os.environ["HOROVOD_HOSTNAME"], int(os.environ["HOROVOD_RANK"])
torch.manual_seed(start_rank)
model = torch.nn.Linear(2, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0, worlds=0, steps=0)

def check_environment():
    """Compare Horovod's variables with the world."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    for name in names:
        assert os.environ[f"HOROVOD_{name.upper()}"] == str(getattr(hvd, name)()), name
    assert os.environ["HOROVOD_ELASTIC"] == "1" and os.environ["HOROVOD_HOSTNAME"] == hostname

def at(table, default=None):
    return plan.get(table, {}).get(str(state.epoch), default)

def fail_if_planned():
    ranks, how = at("fail", ([], ""))
    if start_rank in ranks and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if start_rank in ranks:
        raise RuntimeError(f"start rank {start_rank} fails in epoch {state.epoch}")

def write_hosts(hosts):
    with open(f"{folder}/new", "w") as file:
        file.write("".join(f"{host}\\n" for host in hosts))
    os.rename(f"{folder}/new", f"{folder}/hosts")

def change_hosts(lists):
    write_hosts(lists[0])
    for number, hosts in enumerate(lists[1:], 1):
        threading.Timer(1.5 * number, write_hosts, [hosts]).start()
    end = time.monotonic() + 60
    while state._host_messages.empty() and time.monotonic() < end:
        time.sleep(0.05)
    assert not state._host_messages.empty(), "no message about the new hosts"

def wait_for_size():
    while at("size") and hvd.size() != at("size"):
        time.sleep(0.1)
        state.commit()

def one_step():
    optimizer.zero_grad()
    model(torch.full((4, 2), 1.0 + state.epoch, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    state.batch += 1
    state.steps += 1
    state.commit()

@hvd.elastic.run
def train(state):
    state.worlds += 1
    check_environment()
    while state.epoch < plan["epochs"]:
        fail_if_planned()
        wait_for_size()
        while state.batch < 2:
            one_step()
        if hvd.rank() == 0:
            with open(f"{folder}/log", "a") as log:
                print(json.dumps([state.epoch, hostname, start_rank, hvd.size(), state.worlds]), file=log)
            if at("hosts"):
                change_hosts(at("hosts"))
        state.epoch, state.batch = state.epoch + 1, 0
        state.commit()

train(state)
assert state.steps == 2 * plan["epochs"]
weights = hvd.allgather_object([each.tolist() for each in model.parameters()])
assert all(each == weights[0] for each in weights)
print("finished", hvd.rank(), "of", hvd.size(), "on", hostname, flush=True)
hvd.shutdown()
'''


class ElasticScript:
    """The script in a folder, with the list of hosts that its discovery script prints."""

    def __init__(self, folder: Path, hosts: list[str]) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        self.list_hosts(hosts)

    def list_hosts(self, hosts: list[str]) -> None:
        """Replace the list of hosts."""
        new = self.folder / "new by the test"
        new.write_text("".join(f"{host}\n" for host in hosts))
        new.rename(self.folder / "hosts")

    @property
    def discovery(self) -> str:
        """The discovery script."""
        return f"cat '{self.folder}/hosts'"

    def command(self, **plan: Any) -> list[str]:
        """Return the command of a worker that obeys a plan."""
        return ["python", str(self.folder / "train.py"), str(self.folder), json.dumps(plan)]

    @property
    def log(self) -> list[tuple]:
        """What rank 0 has logged: epoch, host, start rank, size, number of worlds."""
        file = self.folder / "log"
        text = file.read_text() if file.exists() else ""
        return [tuple(json.loads(line)) for line in text.splitlines()]
