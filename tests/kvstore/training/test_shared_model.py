"""Training on shared weights: rounds, pushes, synchronization points."""

import pytest
import torch

from support.parties import BATCH, EPOCH, Party, missed, same
from support.ranks import Ranks


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_replay_equals_the_run(ranks: Ranks, optimizer: str) -> None:
    def work() -> object:
        party = Party("async", optimizer, width=1200, sleeps=0.005)
        party.share()
        first = party.round(0, 44)
        second = party.round(first.position, 80)
        assert (first.position, second.position) == (44, 80)
        return first.pushes + second.pushes, party.weights()

    results = ranks(3, work)
    pushes, weights = results[0]
    assert all(other[0] == pushes and same(other[1], weights) for other in results)
    assert missed(pushes, 80) == set()
    alone = Party("async", optimizer, width=1200)
    assert alone.replay(pushes) is None
    assert same(alone.weights(), weights)
