"""The same training with torchft: a lighthouse, and one replica group of one process per worker.

    python torchft_peer.py FOLDER [OPTION ...]   the lighthouse, with options, and three workers
    python torchft_peer.py FOLDER worker N       one of them

It has the options of torchft's own example: Gloo, a lighthouse with `--quorum_tick_ms 100
--join_timeout_ms 10000`, defaults otherwise. A survivor's step fails with the connection to the
dead worker; the next one waits until the lighthouse has had no heartbeat of that worker for 5 s.

The gradients are summed as one buffer by `Manager.allreduce`. With torchft's own wrapper
(`DistributedDataParallel`, version 0.2.0 with torch 2.13 on Gloo) the survivors end with an
AssertionError in its hook, because the future of a failed sum is not set.

torchft may be installed in an environment of its own (`measure.torchft_python`).
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

from allstep.bench.recover.notes import Notebook
from allstep.bench.recover.small_cnn_task import small_cnn

_NUM_WORKERS = 3
_LIGHTHOUSE = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
# Stores live as long as the process.
_stores: list[TCPStore] = []


def main(folder: str, *options: str) -> None:
    """Run the lighthouse, with more options, and the workers until the bench ends them."""
    port = _free_port()
    lighthouse = str(Path(sys.executable).with_name("torchft_lighthouse"))
    subprocess.Popen([lighthouse, "--bind", f"[::]:{port}", *_LIGHTHOUSE, *options])
    env = {**os.environ, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
    workers = [
        subprocess.Popen([sys.executable, __file__, folder, "worker", str(number)], env=env)
        for number in range(_NUM_WORKERS)
    ]
    for worker in workers:
        worker.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def worker(folder: str, number: int) -> None:
    """Train until the bench ends this process."""
    notes = Notebook(Path(folder))
    notes.write("rank", number)
    model, sgd, images, labels = small_cnn()
    manager = _manager(number, model, sgd)
    optimizer, size, has_failed = Optimizer(manager, sgd), 0, False
    while True:
        # Asks for the next quorum, which is formed during the forward pass.
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        before, size = size, manager.num_participants()
        if size < before:
            if not has_failed:
                # It was lost between two steps.
                notes.write("noticed", size)
            notes.write("formed", size)
        _sum_gradients(manager, model)
        steps = manager.current_step()
        optimizer.step()
        if manager.current_step() > steps:
            notes.write("step", size)
        else:
            notes.write("noticed", size)
            has_failed = True


def _manager(number: int, model: nn.Module, sgd: torch.optim.Optimizer) -> Manager:
    """Return the manager of a replica group that has one process."""

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": sgd.state_dict()}

    def load(found: dict[str, Any]) -> None:
        model.load_state_dict(found["model"])
        sgd.load_state_dict(found["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    # The manager connects to it by its address.
    _stores.append(store)
    return Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"worker_{number}",
    )


def _sum_gradients(manager: Manager, model: nn.Module) -> None:
    parameters = [each for each in model.parameters() if each.grad is not None]
    flat = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
    manager.allreduce(flat).wait()
    parts = torch.split(flat, [each.numel() for each in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


if __name__ == "__main__":
    if sys.argv[2:3] == ["worker"]:
        worker(sys.argv[1], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
