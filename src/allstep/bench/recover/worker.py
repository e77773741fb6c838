"""A worker of `allstep bench recover`, in an elastic run.

    python -m allstep.bench.recover.worker train FOLDER [MB]
    python -m allstep.bench.recover.worker form|form-new FOLDER

`train` trains a small CNN as a script with `hvd.elastic` does; rank 1 also holds MB megabytes.
`form` has the three groups of a training run (default, engine, gradients) and sums on them until a
worker is lost; `form-new` forgets its shared memory before it joins the next world.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import allstep.torch as hvd
from allstep import comm
from allstep.bench.recover.notes import Notebook
from allstep.bench.recover.task import small_cnn, train_step
from allstep.comm.group.init import group_for
from allstep.comm.group.process_group import AllstepGroup
from allstep.comm.join.membership import membership
from allstep.comm.memory.kept import kept_memory
from allstep.errors import PeerLost
from allstep.hvd.exceptions import HorovodInternalError

_STEPS_PER_COMMIT = 10


def train(notes: Notebook, num_megabytes: int) -> None:
    """Train until the bench ends this process."""
    hvd.init()
    notes.write("rank", hvd.rank())
    model, sgd, images, labels = small_cnn()
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    ballast = torch.ones(num_megabytes << 18) if hvd.rank() == 1 else None
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    state.register_reset_callbacks([lambda: notes.write("formed", hvd.size())])

    def steps(state: hvd.elastic.TorchState) -> None:
        while True:
            train_step(model, optimizer, images, labels)
            notes.write("step", hvd.size())
            state.step += 1
            if state.step % _STEPS_PER_COMMIT == 0:
                state.commit()

    @hvd.elastic.run
    def run(state: hvd.elastic.TorchState) -> None:
        try:
            steps(state)
        except HorovodInternalError:
            notes.write("noticed", hvd.size())
            raise

    run(state)
    del ballast


def form(notes: Notebook, *, keeps: bool) -> None:
    """Sum on three groups until a worker is lost, then form the next world."""
    world = comm.init()
    notes.write("rank", world.rank)
    while True:
        groups = [group_for("engine"), group_for("gradients")]
        if world.generation:
            place = membership()
            assert place is not None
            notes.write("placed", world.size, place.placed_at)
            notes.write("formed", world.size)
        try:
            _sum_until_lost(groups, notes, world.size)
        except PeerLost:
            if not keeps:
                kept_memory().segments.clear()
            world = comm.rejoin()


def _sum_until_lost(groups: list[AllstepGroup], notes: Notebook, size: int) -> None:
    ones = torch.ones(1 << 18)
    while True:
        dist.all_reduce(ones.fill_(1.0))
        for group in groups:
            group.allreduce([torch.ones(3)]).wait()
        notes.write("step", size)


def main(kind: str, folder: str, num_megabytes: str = "0") -> None:
    """Run one kind of worker."""
    notes = Notebook(Path(folder))
    if kind == "train":
        train(notes, int(num_megabytes))
    else:
        form(notes, keeps=kind == "form")


if __name__ == "__main__":
    main(*sys.argv[1:])
