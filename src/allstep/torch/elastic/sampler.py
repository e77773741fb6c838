"""A sampler that records which samples were processed, so that an epoch can resume in a world of
another size.
"""

import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from allstep.hvd.place import rank, size


class ElasticSampler(Sampler[int]):
    """Distributes the samples that were not yet processed evenly among the ranks.

    Some samples are used twice if the numbers do not divide. Call `record_batch` after each batch
    and `set_epoch` at the end of each epoch, and put the sampler into the elastic state. `shuffle`:
    whether the order is random (default: True). `seed`: of the order (default: 0).
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        # Samples of this epoch that all ranks together have processed.
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in another order."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Distribute the remaining samples among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the epoch of a saved state."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        padded = [left[place % len(left)] for place in range(self.total_size)]
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
