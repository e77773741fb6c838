"""A worker of `allstep bench recover --part join`: trains a model with `hvd.elastic`.

    python -m allstep.bench.recover.join_worker FOLDER MODEL

It builds the model before `hvd.init()`: a worker joins in that call, and from then on the others
wait for it until it synchronizes its state. It commits after each step, and notes when the
broadcast of the state begins and when it ends. The copy in memory that follows the broadcast begins
with the note "saving".
"""

import sys
from pathlib import Path
from typing import Any

import allstep.torch as hvd
from allstep.bench.recover.model_task import model_task
from allstep.bench.recover.notes import Notebook
from allstep.bench.recover.small_cnn_task import train_step


class NotedState(hvd.elastic.TorchState):
    """A state that notes when it takes over rank 0's values, and when it saves them."""

    def __init__(self, notes: Notebook, **values: Any) -> None:
        self._notes = notes
        super().__init__(**values)

    def sync(self) -> None:
        """Take over rank 0's values. A collective."""
        self._notes.write("syncing", hvd.size())
        super().sync()
        self._notes.write("synced", hvd.size())

    def save(self) -> None:
        """Save all values."""
        self._notes.write("saving", hvd.size())
        super().save()


def main(folder: str, name: str) -> None:
    """Train until the bench ends this process."""
    notes = Notebook(Path(folder))
    model, sgd, images, labels = model_task(name)
    hvd.init()
    notes.write("rank", hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())

    @hvd.elastic.run
    def run(state: NotedState) -> None:
        while True:
            train_step(model, optimizer, images, labels)
            notes.write("step", hvd.size())
            state.commit()

    run(NotedState(notes, model=model, optimizer=optimizer))


if __name__ == "__main__":
    main(*sys.argv[1:])
