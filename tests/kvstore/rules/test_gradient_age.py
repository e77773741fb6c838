"""The rule of `stale:S`, by simulation: no gradient older than S rounds, and no deadlock.

The reference is the definition: the age of a gradient is the number of updates that other parties
applied between the read and the gradient's own update.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from allstep.kvstore.rules.gradient_age import NONE, blocker, in_time, max_age


class Parties:
    """Parties that read and push at random; those that the rule holds back stay where they are."""

    def __init__(self, num_parties: int, rounds: int) -> None:
        self.bound = max_age(rounds, num_parties)
        self.updates: list[int] = []
        # What each party has read: the number of updates, or None if it has no gradient.
        self.reads: dict[int, int | None] = dict.fromkeys(range(num_parties), 0)
        self.ages: list[int] = []

    def may_push(self, party: int) -> bool:
        others = {
            other: read for other, read in self.reads.items() if other != party and read is not None
        }
        return blocker(len(self.updates), others, self.bound) is None

    def push(self, party: int) -> None:
        read = self.reads[party]
        assert read is not None
        self.ages.append(sum(other != party for other in self.updates[read:]))
        self.updates.append(party)
        self.reads[party] = None

    def read(self, party: int) -> None:
        self.reads[party] = len(self.updates)


@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(), st.lists(st.floats(0.01, 1), min_size=6)
)
def test_ages_are_bounded_and_some_party_may_always_push(
    num_parties: int, rounds: int, seed: int, speeds: list[float]
) -> None:
    parties, draws = Parties(num_parties, rounds), random.Random(seed)
    for _ in range(200):
        party = draws.choices(range(num_parties), speeds[:num_parties])[0]
        if parties.reads[party] is None:
            parties.read(party)
        elif parties.may_push(party):
            parties.push(party)
        waiting = [each for each, read in parties.reads.items() if read is not None]
        assert len(waiting) < num_parties or any(map(parties.may_push, waiting))
    assert max(parties.ages, default=0) <= parties.bound


def test_a_slow_party_holds_up_the_others_at_the_bound() -> None:
    parties = Parties(2, 2)
    for _ in range(4):
        assert parties.may_push(0)
        parties.push(0)
        parties.read(0)
    assert not parties.may_push(0)
    assert blocker(4, {1: 0}, parties.bound) == 1
    parties.push(1)
    assert parties.ages[-1] == 4
    assert parties.may_push(0)


def test_two_parties_at_the_bound_do_not_wait_for_each_other() -> None:
    """Checked one by one, each would make the other's gradient too old."""
    parties = Parties(3, 1)
    pushes = 0
    while parties.may_push(2):
        parties.push(2)
        parties.read(2)
        pushes += 1
    assert pushes == 2
    for party in (0, 1):
        assert parties.may_push(party)
        parties.push(party)
    assert max(parties.ages) == 3


@given(
    st.dictionaries(st.integers(0, 7), st.integers(-1, 40)), st.integers(0, 40), st.integers(1, 9)
)
def test_gradients_in_time_can_all_be_pushed(
    reads: dict[int, int], version: int, bound: int
) -> None:
    kept = in_time(version, reads, bound)
    waiting = {party: reads[party] for party in kept}
    assert all(reads[party] != NONE for party in kept)
    while waiting:
        party = min(waiting, key=lambda each: (waiting[each], each))
        assert version - waiting.pop(party) <= bound
        version += 1


def test_the_end_of_an_epoch_keeps_all_gradients() -> None:
    """Each of 4 parties has pushed last in turn, and read what that made."""
    assert in_time(20, {0: 17, 1: 18, 2: 19, 3: 20}, max_age(1, 4)) == {0, 1, 2, 3}
    assert in_time(20, {0: 15, 1: 18, 2: NONE, 3: 20}, max_age(1, 4)) == {1, 3}
