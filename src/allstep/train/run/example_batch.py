"""A batch with which a step is tried before training: for timing, and to warm up a worker."""

import numpy as np
import torch
from torch import Tensor

from allstep.data import Batch, Loader
from allstep.train.input.images import make_transform
from allstep.train.input.splits import Splits
from allstep.train.score.evaluate import ToInput
from allstep.train.task.task import Task

# Samples that are read; a larger batch repeats them.
_MAX_READ = 32


def make_example(task: Task, splits: Splits, to_input: ToInput, count: int) -> Batch:
    """Return `count` samples as the model takes them: those of the task, or the first ones.

    Their numbers mean nothing.
    """
    stored, target = task.example(splits.shape, count) or _first_samples(splits, count)
    data = to_input(stored)
    return Batch(data, target.to(data.device), np.zeros(count, np.int64), count, 0, 0)


def _first_samples(splits: Splits, count: int) -> tuple[Tensor, Tensor]:
    """Return stored samples and targets: the first of the training split, repeated."""
    split = splits.train.first(min(count, len(splits.train), _MAX_READ))
    loader = Loader(
        split.source,
        make_transform("prepare", splits.section, split.seen),
        batch=len(split),
        seed=None,
        numbers=split.numbers,
        workers=0,
    )
    batch = next(iter(loader.batches()))
    rows = torch.arange(count) % max(1, batch.weight)
    return batch.data[rows], batch.target[rows]
