"""What a worker of `bench step --framework` needs from a framework: contenders to train.

A module for a framework has `contenders(model, rank, size)`, which returns functions by the
names of the table's rows. Each makes a `Trainee`: a model of its own, with the same weights as
those of the others.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from allstep.bench.step.frameworks.tasks import Task

Batch = tuple[Any, Any]
# The data of a rank: few batches, used one after the other in every turn.
NUM_BATCHES = 4


class Trainee(Protocol):
    """A model and its optimizer, as a training script would use them."""

    @abstractmethod
    def start(self) -> None:
        """Get ready for a turn; not timed."""

    @abstractmethod
    def step(self, images: Any, labels: Any) -> Any:
        """Run one training step and return the loss, as the framework returns it."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the last step is complete; timed."""


@dataclass(frozen=True)
class Peer:
    """Another library, connected. `make`: makes the model. `meet`: waits for all its ranks."""

    make: Callable[[], Trainee]
    meet: Callable[[], Any]


Contenders = Mapping[str, Callable[[], Trainee]]


def make_batches(task: Task, batch: int, rank: int) -> Sequence[Batch]:
    """Return synthetic images and labels of a rank, as numpy arrays."""
    chance = np.random.default_rng(rank)
    return [
        (
            chance.standard_normal((batch, *task.shape), dtype=np.float32),
            chance.integers(task.num_classes, size=batch).astype(np.int32),
        )
        for _ in range(NUM_BATCHES)
    ]
