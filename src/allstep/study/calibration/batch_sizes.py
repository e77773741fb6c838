"""The batch sizes at which one worker is measured."""


def sizes_of(batch: int | None, batch_per_worker: int | None, num_workers: int) -> tuple[int, ...]:
    """Return at least two sizes in rising order.

    With a global batch these are the whole batch, its share for all workers of the host, and a
    quarter of that; with a batch per worker, that batch and a quarter of it. A batch norm needs two
    samples.
    """
    if batch_per_worker is not None:
        return _rising(batch_per_worker, batch_per_worker // 4)
    assert batch is not None
    share = max(2, batch // num_workers)
    return _rising(batch, share, share // 4) if num_workers > 1 else _rising(batch, batch // 4)


def _rising(*sizes: int) -> tuple[int, ...]:
    found = sorted({max(2, each) for each in sizes})
    return tuple(found) if len(found) > 1 else (found[0], 2 * found[0])
