"""The same training under `torchrun --max-restarts`: DDP on Gloo, with a checkpoint of its own.

    torchrun --max-restarts 1 torchrun_peer.py FOLDER

torchrun ends all workers when one is lost, and starts them again: imports, rendezvous, checkpoint.

The agent's store survives a restart (torch 2.13), and with it Gloo's addresses of the workers that
have ended. A new worker that reads one of them before it is replaced connects to no process. So
each attempt has keys of its own here.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from allstep.bench.recover.notes import Notebook
from allstep.bench.recover.small_cnn_task import small_cnn, train_step

_STEPS_PER_CHECKPOINT = 10


def main(folder: str) -> None:
    """Train until the bench ends this process."""
    notes = Notebook(Path(folder))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_restarted = attempt != "0"
    if is_restarted:
        notes.write("noticed", 0)
    _join(attempt)
    notes.write("rank", dist.get_rank())
    if is_restarted:
        notes.write("formed", 0)
    model, optimizer, images, labels = small_cnn()
    wrapped = DistributedDataParallel(model)
    checkpoint, number = Path(folder) / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    while True:
        train_step(wrapped, optimizer, images, labels)
        number += 1
        notes.write("step after" if is_restarted else "step", dist.get_world_size())
        if number % _STEPS_PER_CHECKPOINT == 0 and dist.get_rank() == 0:
            new = checkpoint.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
            new.replace(checkpoint)


def _join(attempt: str) -> None:
    """Form the default group, with the keys of this attempt."""
    store, rank, size = next(iter(rendezvous("env://")))
    mine = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=mine, rank=rank, world_size=size)


if __name__ == "__main__":
    main(*sys.argv[1:])
