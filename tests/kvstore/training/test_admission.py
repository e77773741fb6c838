"""Which pushes wait: ages in logs of `stale`, leads in `clock`."""

import time

import pytest

from allstep.kvstore.training import Claim
from support.parties import Party, missed, same
from support.ranks import Ranks


@pytest.mark.soak(5)
@pytest.mark.parametrize("rounds", [1, 2])
def test_no_age_exceeds_the_bound(ranks: Ranks, rounds: int, soak_round: int) -> None:
    """Rank 2 is several times slower than the others, which have random sleeps."""

    def work() -> object:
        party = Party(f"stale:{rounds}", "plain", sleeps=0.003, seed=soak_round)
        party.share()

        def slow(claim: Claim) -> None:
            time.sleep(0.012 if party.shared.rank == 2 else 0)

        point = party.round(0, 120, slow)
        return party.round(point.position, 180, slow).pushes, point.pushes, party.weights()

    results = ranks(3, work)
    second, first, weights = results[0]
    assert all(same(other[2], weights) for other in results)
    assert missed(first + second, 180) == set()
    assert max(push.age for push in first + second) <= rounds * 3


def test_an_asynchronous_run_exceeds_it(ranks: Ranks) -> None:
    """The same sleeps without a bound: the test above can fail."""

    def work() -> int:
        party = Party("async", "plain")
        party.share()
        point = party.round(0, 240, lambda _: time.sleep(0.05 if party.shared.rank == 2 else 0))
        return max(push.age for push in point.pushes)

    assert ranks(3, work)[0] > 3


def test_clock_bounds_the_lead(ranks: Ranks) -> None:
    """No party gets more than 2 pushes ahead of one that computes."""

    def work() -> list[int]:
        party = Party("clock:2", "plain")
        party.share()
        point = party.round(0, 240, lambda _: time.sleep(0.02 if party.shared.rank else 0))
        return [push.party for push in point.pushes]

    for order in ranks(2, work):
        # A party that begins late starts with the count of the other one; one that has no claim
        # left does not count.
        order = order[order.index(1) :]
        leads = [order[:place].count(0) - order[:place].count(1) for place in range(len(order))]
        assert max(leads) - min(leads) <= 2 * 2 + 1
        assert abs(order.count(0) - order.count(1)) <= 5


def test_a_party_without_work_holds_up_none(ranks: Ranks) -> None:
    """In `stale:1`, rank 1 begins its first step late and leaves its claims to rank 0."""

    def work() -> list[int]:
        party = Party("stale:1", "plain")
        shared = party.share()
        if shared.rank:
            shared.begin_round(0, 60, 12)
            time.sleep(1)
            assert shared.claims.next() is None
            point = shared.synchronize()
            assert point is not None
        else:
            point = party.round(0, 60)
        return [push.party for push in point.pushes]

    assert ranks(2, work) == [[0] * 10] * 2
