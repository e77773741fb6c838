"""The batch of a run whose config names none."""

_ENOUGH_UPDATES = 16
"""Updates in an epoch; 30 epochs are then at least 480 updates."""
_SMALLEST_BATCH = 8
"""Below it the statistics of batch norms are too noisy."""


def usual_batch(base_batch: int, num_train: int) -> int:
    """Return `base_batch`, halved until an epoch has at least 16 updates.

    `num_train` is the number of samples of an epoch. The batch is not halved below 8, and is never
    larger than the dataset. The learning rate is scaled to it.
    """
    batch = base_batch
    while batch // 2 >= _SMALLEST_BATCH and batch * _ENOUGH_UPDATES > num_train:
        batch //= 2
    return max(1, min(batch, num_train))
