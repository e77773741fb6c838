"""The loader: no sample lost or repeated, at any number of workers, from any position on."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.data import Batch, Loader

IMAGES = np.arange(400, dtype=np.uint8).reshape(100, 2, 2)
LABELS = np.arange(100, dtype=np.int64)


def loader(n: int, batch: int, rank: int = 0, size: int = 1, seed: int | None = 5) -> Loader:
    return Loader(IMAGES[:n], LABELS[:n], batch=batch, seed=seed, rank=rank, size=size)


def merged(shares: list[Batch]) -> list[int]:
    """The global batch, from the shares of all ranks."""
    assert len({(share.epoch, share.position) for share in shares}) == 1
    return [number for share in shares for number in share.samples.tolist()]


@settings(deadline=None)
@given(n=st.integers(1, 60), batch=st.integers(1, 80), size=st.integers(1, 12), epochs=st.integers(1, 3))
def test_all_workers_together_see_what_one_sees(n: int, batch: int, size: int, epochs: int) -> None:
    alone = list(loader(n, batch).batches(0, epochs * n))
    together = zip(*(loader(n, batch, rank, size).batches(0, epochs * n) for rank in range(size)), strict=True)
    assert [merged(list(shares)) for shares in together] == [share.samples.tolist() for share in alone]
    for epoch in range(epochs):
        seen = [number for share in alone if share.epoch == epoch for number in share.samples.tolist()]
        assert sorted(seen) == list(range(n))


@settings(deadline=None)
@given(data=st.data(), n=st.integers(1, 60), batch=st.integers(1, 20), other=st.integers(1, 20))
def test_resuming_at_any_position_with_any_batch_loses_nothing(
    data: st.DataObject, n: int, batch: int, other: int
) -> None:
    stop = 3 * n
    position = data.draw(st.integers(0, stop))
    whole = [number for share in loader(n, batch).batches(0, stop) for number in share.samples.tolist()]
    before = [number for share in loader(n, batch).batches(0, position) for number in share.samples.tolist()]
    after = [number for share in loader(n, other).batches(position, stop) for number in share.samples.tolist()]
    assert before + after == whole


def test_a_batch_holds_what_it_says() -> None:
    batches = list(loader(10, 4, rank=1, size=2).batches(10, 20))
    assert [(batch.epoch, batch.position, batch.weight) for batch in batches] == [(1, 10, 2), (1, 14, 2), (1, 18, 1)]
    for batch in batches:
        assert batch.target.tolist() == batch.samples.tolist()
        assert torch.equal(batch.data, torch.from_numpy(IMAGES[batch.samples]))
        assert batch.data.dtype == torch.uint8
        assert batch.weight == len(batch.samples) == len(batch.data)


def test_a_share_may_be_empty() -> None:
    shares = [next(loader(2, 2, rank, 4).batches()) for rank in range(4)]
    assert sorted(share.weight for share in shares) == [0, 0, 1, 1]
    assert all(share.data.shape == (share.weight, 2, 2) for share in shares)


def test_without_a_seed_samples_come_as_they_lie() -> None:
    numbers = np.array([7, 3, 5])
    part = Loader(IMAGES, LABELS, batch=2, numbers=numbers)
    assert [batch.samples.tolist() for batch in part.batches()] == [[7, 3], [5]]
