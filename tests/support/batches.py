"""Batches for tests that need no loader."""

import numpy as np
from torch import Tensor

from allstep.data import Batch


def batch_of(data: Tensor, target: Tensor) -> Batch:
    """Return a batch at the start of a run, with the samples 0, 1, ..."""
    count = len(data)
    return Batch(data, target, np.arange(count), count, epoch=0, position=0)
