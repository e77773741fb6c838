"""Parts of lost servers: any order of losses leads to the same place."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from allstep.kvstore.rules.offers import NONE, Offer, freshest, num_lost
from allstep.kvstore.rules.successors import successor


@given(st.integers(0, 10**6), st.integers(1, 6), st.data())
def test_a_part_is_on_a_living_server_and_moves_only_with_its_own(
    number: int, num_servers: int, data: st.DataObject
) -> None:
    servers = range(num_servers)
    home = data.draw(st.sampled_from(servers))
    order = data.draw(st.permutations(servers))
    lost, at = set[int](), home
    for each in order:
        lost.add(each)
        now = successor(number, home, num_servers, lost)
        assert now is None if len(lost) == num_servers else now not in lost
        assert now == at or at in lost
        at = -1 if now is None else now


def test_the_parts_of_a_lost_server_are_spread() -> None:
    for num_servers in (2, 3, 5):
        # Numbers of the parts of one server are often every n-th.
        numbers = range(1, 400 * num_servers, num_servers)
        found = Counter(successor(number, 1, num_servers, {1}) for number in numbers)
        assert 1 not in found and len(found) == num_servers - 1
        assert max(found.values()) <= 1.3 * 400 / (num_servers - 1)


def test_the_freshest_copy() -> None:
    assert freshest({0: Offer(0, 7, 4), 1: Offer(0, 9, 4), 2: Offer(0, 9, 4)}) == 1
    # A copy of a later server is fresher, whatever its version.
    assert freshest({0: Offer(1, 2, 0), 1: Offer(0, 9, 0)}) == 0
    assert freshest({0: Offer(0, NONE, 3)}) is None
    # Three parties sent 12 updates; the copy has 9 of them.
    assert num_lost({0: Offer(0, 7, 4), 1: Offer(0, 9, 5), 2: Offer(0, 8, 3)}, 1) == 3
    assert num_lost({0: Offer(1, 2, 1), 1: Offer(0, 9, 5)}, 0) == 0
