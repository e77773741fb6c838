"""A loop over claims delivers the same bits of each sample, on any worker that claims it and with
any loader workers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from allstep.data import Loader
from allstep.data.loading.claimed_shares import ClaimedSamples
from allstep.data.order import Reader
from support.array_sources import Arrays, Singly, noise_transform, sample_images

NUM = 53
CLAIMS = [(start, min(7, NUM - start % NUM, 2 * NUM - start)) for start in (7, 14, 21, 28, 35, 42)]
CLAIMS += [(49, 4), (53, 7), (60, 1), (61, 45)]


def by_position(loader: Loader, claims: list[tuple[int, int]]) -> dict[int, torch.Tensor]:
    """Return the data of each position of the claims."""
    found = {}
    for (start, count), batch in zip(claims, loader.claimed(claims, 45), strict=True):
        assert (batch.position, len(batch.data), batch.weight) == (start, count, count)
        found |= {start + i: each.clone() for i, each in enumerate(batch.data)}
    return found


@pytest.mark.parametrize("options", [{}, {"workers": 2, "kind": "threads"}])
def test_two_parties_see_the_samples_of_one(
    options: dict[str, Any], nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that claims are on both sides of the end of a block.
    monkeypatch.setattr("allstep.data.loading.claimed_shares._BLOCK", 16)
    images = sample_images(NUM)
    alone = Loader(Singly(images), noise_transform(), batch=10, seed=3, workers=0)
    expected = torch.cat([batch.data for batch in alone.batches(7, 2 * NUM)])
    parties = [
        Loader(Singly(images), noise_transform(), batch=10, seed=3, **{"workers": 0, **options})
        for _ in range(2)
    ]
    found = by_position(parties[0], CLAIMS[::3])
    found |= by_position(parties[1], CLAIMS[1::3]) | by_position(parties[1], CLAIMS[2::3])
    assert torch.equal(torch.stack([found[7 + i] for i in range(len(expected))]), expected)
    for party in parties:
        party.close()


def test_worker_processes_see_the_same(nothing_left: None, processes: None) -> None:
    images = sample_images(NUM)
    options: dict[str, Any] = {"batch": 10, "seed": 3}
    here = Loader(Singly(images), noise_transform(), workers=0, **options)
    there = Loader(Singly(images), noise_transform(), workers=1, kind="processes", **options)
    expected, found = by_position(here, CLAIMS[:4]), by_position(there, CLAIMS[:4])
    assert all(torch.equal(found[position], each) for position, each in expected.items())
    there.close()


def test_claims_are_requested_ahead_of_time_and_no_more(nothing_left: None) -> None:
    requested = []

    def claims() -> Iterator[tuple[int, int]]:
        for start in range(0, 50, 5):
            requested.append(start)
            yield start, 5

    images = np.zeros((NUM, 4, 4, 3), np.uint8)
    loader = Loader(Arrays(images), batch=10, workers=1, kind="threads", ahead=2)
    batches = loader.claimed(claims(), 5)
    assert next(batches).position == 0
    assert requested == [0, 5, 10]
    assert [batch.position for batch in batches] == list(range(5, 50, 5))
    loader.close()


def test_a_claim_is_within_one_epoch() -> None:
    samples = ClaimedSamples(Reader(10, 0))
    assert samples.at(5, 5)[0].end == 10
    for start, count in [(5, 6), (0, 0), (-1, 1)]:
        with pytest.raises(ValueError, match="not in one epoch of 10"):
            samples.at(start, count)
